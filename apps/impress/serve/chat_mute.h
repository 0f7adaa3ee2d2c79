/* chat_mute.h: standard error closed to a library that prints what a request holds, where lines may be forged. */
#ifndef SERVE_CHAT_MUTE_H
#define SERVE_CHAT_MUTE_H

/* Until chat_unmute() what is written to standard error goes nowhere; the server's own log has another descriptor. What the
 * first returns is for the second. Threads: any; one at a time, the others wait. */
int chat_mute(void);
void chat_unmute(int before);

#endif
