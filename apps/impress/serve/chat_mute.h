/* chat_mute.h: standard error closed to a library that prints what a request holds, where lines may be forged. */
#ifndef SERVE_CHAT_MUTE_H
#define SERVE_CHAT_MUTE_H

#ifdef __cplusplus
extern "C" {
#endif

/* Until chat_unmute() what is written to standard error goes nowhere; the server's own log has another descriptor. Each
 * call wants one of the other. Threads: any, several at once, and nobody waits for another's. */
void chat_mute(void);
void chat_unmute(void);

#ifdef __cplusplus
}
#endif

#endif
