/* guesses.h: how often an address may try keys that are none. Each has a stock of wrong keys, GUESSES at first, and gets
 * another one every GUESS_NS; who has none left is told to come again later, whatever key it brings: else a right guess
 * would be known by its answer.
 *
 * Of IPv6 addresses the first half counts, which is what one machine can choose from. Addresses are forgotten when their
 * stock is full again, or when too many others are remembered: then the one whose last wrong key is oldest.
 *
 * Threads: any. */
#ifndef SERVE_GUESSES_H
#define SERVE_GUESSES_H

#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>

enum { GUESSES = 10, GUESS_ADDRESSES = 256 };
#define GUESS_NS UINT64_C(3000000000)

typedef struct guesser {
    unsigned char address[9];   /* family, then 4 or 8 bytes */
    uint64_t full_ns, wrong_ns; /* when the stock is full again; the last wrong key. 0: not in use */
} guesser;

typedef struct guesses {
    pthread_mutex_t lock; /* guards what follows */
    guesser known[GUESS_ADDRESSES];
} guesses;

void guesses_init(guesses *g);
void guesses_free(guesses *g);
/* How long `from` has to stay away. 0: its key may be looked at. NULL stands for one more address. */
uint64_t guesses_wait_ns(guesses *g, const struct sockaddr *from, uint64_t now_ns);
/* It brought a wrong key. */
void guesses_wrong(guesses *g, const struct sockaddr *from, uint64_t now_ns);

#endif
