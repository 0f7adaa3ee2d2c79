#include "guesses.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <string.h>

void guesses_init(guesses *g)
{
    memset(g->known, 0, sizeof g->known);
    pthread_mutex_init(&g->lock, NULL);
}

void guesses_free(guesses *g) { pthread_mutex_destroy(&g->lock); }

static void name(const struct sockaddr *from, unsigned char *out)
{
    memset(out, 0, sizeof ((guesser *)0)->address);
    if (!from) return;
    if (from->sa_family == AF_INET) {
        out[0] = 4;
        memcpy(out + 1, &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
    } else if (from->sa_family == AF_INET6) {
        const struct in6_addr *a = &((const struct sockaddr_in6 *)(const void *)from)->sin6_addr;
        bool mapped = IN6_IS_ADDR_V4MAPPED(a);
        out[0] = mapped ? 4 : 6;
        memcpy(out + 1, a->s6_addr + (mapped ? 12 : 0), mapped ? 4 : 8);
    }
}

/* With the lock held. NULL: nothing is known of it. */
static guesser *find(guesses *g, const unsigned char *address)
{
    for (size_t i = 0; i < GUESS_ADDRESSES; i++)
        if (g->known[i].wrong_ns && !memcmp(g->known[i].address, address, sizeof g->known[i].address))
            return &g->known[i];
    return NULL;
}

/* A place for a new one: unused, or of who may be forgotten soonest. */
static guesser *place(guesses *g, uint64_t now_ns)
{
    guesser *best = &g->known[0];
    for (size_t i = 0; i < GUESS_ADDRESSES; i++) {
        guesser *k = &g->known[i];
        if (k->full_ns <= now_ns) return k;
        if (k->wrong_ns < best->wrong_ns) best = k;
    }
    return best;
}

uint64_t guesses_wait_ns(guesses *g, const struct sockaddr *from, uint64_t now_ns)
{
    unsigned char address[sizeof ((guesser *)0)->address];
    name(from, address);
    pthread_mutex_lock(&g->lock);
    const guesser *k = find(g, address);
    /* One more is free as soon as the stock lacks fewer than all of them. */
    uint64_t room = (GUESSES - 1) * GUESS_NS;
    uint64_t wait = k && k->full_ns > now_ns + room ? k->full_ns - now_ns - room : 0;
    pthread_mutex_unlock(&g->lock);
    return wait;
}

void guesses_wrong(guesses *g, const struct sockaddr *from, uint64_t now_ns)
{
    unsigned char address[sizeof ((guesser *)0)->address];
    name(from, address);
    pthread_mutex_lock(&g->lock);
    guesser *k = find(g, address);
    if (!k) {
        k = place(g, now_ns);
        memcpy(k->address, address, sizeof address);
        k->full_ns = 0;
    }
    k->full_ns = (k->full_ns > now_ns ? k->full_ns : now_ns) + GUESS_NS;
    k->wrong_ns = now_ns;
    pthread_mutex_unlock(&g->lock);
}
