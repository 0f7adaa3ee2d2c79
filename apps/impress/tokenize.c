/* tokenize.c: a stack for llama.cpp's tokeniser.
 *
 * The patterns by which many models' texts are cut into words are std::regex's, which goes one call deeper with each
 * character of a match: 320 bytes with GCC's library, so that 26,000 equal letters are more than 8 MB. A text that may
 * match for long is cut on a thread of its own, whose stack is made for it; of that only what is used becomes memory.
 *
 * No pattern goes on from one line to the next, but for white space, and slashes, that follow line ends. */
#include "tokenize.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

enum {
    CHARACTER_BYTES = 512,
    OWN_BYTES = 1 << 20,     /* for all else */
    SHORT_CHARACTERS = 4096, /* these have place on any stack */
    LARGE_CHARACTERS = 64 << 10,
};

/* One after the other: else a few such texts could take all memory. */
static pthread_mutex_t large = PTHREAD_MUTEX_INITIALIZER;

typedef struct task {
    const struct llama_vocab *vocab;
    const char *text;
    size_t n_bytes;
    llama_token *tokens;
    int32_t room;
    bool bos, special;
    int32_t n;
} task;

static void *work(void *arg)
{
    task *t = arg;
    t->n = llama_tokenize(t->vocab, t->text, (int32_t)t->n_bytes, t->tokens, t->room, t->bos, t->special);
    return NULL;
}

size_t app_tokenize_stretch(const char *text, size_t n_bytes)
{
    size_t longest = 0, n = 0;
    bool line_end = false;
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 0x80 && c < 0xc0) continue; /* the same character goes on */
        /* Characters that aren't ASCII may be white space. */
        bool goes_on = c == ' ' || c == '/' || (c >= '\t' && c <= '\r') || c >= 0x80;
        if (line_end && !goes_on) {
            line_end = false;
            n = 0;
        }
        line_end |= c == '\n' || c == '\r';
        if (++n > longest) longest = n;
    }
    return longest;
}

/* 0, or an error's number. */
static int run(task *t, size_t stack_bytes)
{
    pthread_attr_t attr;
    pthread_t thread;
    int rc = pthread_attr_init(&attr);
    if (rc) return rc;
    rc = pthread_attr_setstacksize(&attr, stack_bytes);
    if (!rc) rc = pthread_create(&thread, &attr, work, t);
    if (!rc) rc = pthread_join(thread, NULL);
    pthread_attr_destroy(&attr);
    return rc;
}

int32_t app_tokenize(const struct llama_vocab *vocab, const char *text, size_t n_bytes, llama_token *tokens,
                     int32_t room, bool bos, bool special)
{
    task t = {vocab, text, n_bytes, tokens, room, bos, special, INT32_MIN};
    size_t n = n_bytes > SHORT_CHARACTERS ? app_tokenize_stretch(text, n_bytes) : 0;
    if (n_bytes > INT32_MAX || n > APP_TOKENIZE_CHARACTERS) {
        errno = EMSGSIZE;
        return INT32_MIN;
    }
    if (n <= SHORT_CHARACTERS) {
        work(&t);
        return t.n;
    }
    const bool alone = n > LARGE_CHARACTERS;
    if (alone) pthread_mutex_lock(&large);
    int rc = run(&t, OWN_BYTES + n * CHARACTER_BYTES);
    if (alone) pthread_mutex_unlock(&large);
    if (rc) errno = ENOMEM;
    return t.n;
}

bool app_tokenize_more(const struct llama_vocab *vocab, const char *text, size_t n_bytes, bool bos, bool special,
                       llama_token **tokens, size_t *n)
{
    if (n_bytes == 0 && !bos) return true;
    errno = 0;
    if (n_bytes > INT32_MAX / 4) return false;
    /* Mostly there are fewer tokens than bytes; where not (a blank put in front, bytes as tokens), it is told. */
    size_t room = n_bytes + 8;
    for (;;) {
        llama_token *grown = realloc(*tokens, (*n + room) * sizeof *grown);
        if (!grown) return false;
        *tokens = grown;
        int32_t got = app_tokenize(vocab, text, n_bytes, grown + *n, (int32_t)room, bos, special);
        if (got >= 0) {
            *n += (size_t)got;
            return true;
        }
        if (got == INT32_MIN || (size_t)-got <= room) return false;
        room = (size_t)-got;
    }
}
