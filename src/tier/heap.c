/* heap.c: blocks in pieces, in lists by size.
 *
 * A piece:
 *
 *     0     48     64          112
 *     piece | head | memory    | head | memory ...         | head of the end
 *
 * Heads lie just before cache lines, so that memory begins with one. Sizes of blocks are counted in lines, with the
 * head. */
#include "tier/heap.h"

#include <pthread.h>
#include <stdbool.h>

#include "base/alloc.h"

#if defined __SANITIZE_ADDRESS__
#define HAS_ASAN 1
#elif defined __has_feature
#if __has_feature(address_sanitizer)
#define HAS_ASAN 1
#endif
#endif
/* What is free may not be touched, which AddressSanitizer can't know by itself. */
#ifdef HAS_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, n_bytes) ((void)(at), (void)(n_bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, n_bytes) ((void)(at), (void)(n_bytes))
#endif

enum {
    LINE = 64,
    HEAD = 16,
    LEAST_PIECE = 64 << 10,
    MOST_PIECE = 64 << 20,
    PIECES = 8,    /* a budget is so many, or more where they would be larger than the most */
    IN_PIECE = 8,  /* blocks that a piece has room for, at least; what is larger is memory of its own */
    SUB_BITS = 4,  /* classes between two powers of two: 1 << SUB_BITS */
    SUBS = 1 << SUB_BITS,
    CLASSES = 320, /* up to 2^23 lines */
    WORDS = CLASSES / 64,
    LOOKS = 8      /* at blocks of the class that is asked for, which may be too small */
};

typedef struct block {
    uint32_t lines;            /* 0: the end of a piece, or memory of its own */
    uint32_t before;           /* lines of the block before it in the piece; 0: it is the first */
    uint64_t used;
    struct block *prev, *next; /* free: in the list of its class; else its memory begins here */
} block;

typedef struct piece {
    struct piece *prev, *next;
    size_t n_bytes;
} piece;

_Static_assert(offsetof(block, prev) == HEAD && sizeof(block) <= LINE, "a head before the links");
_Static_assert(sizeof(piece) <= LINE - HEAD, "a piece before the first head");

struct imp_heap {
    pthread_mutex_t mutex;
    size_t piece_bytes, largest; /* of memory in pieces */
    piece *pieces;               /* guarded by mutex, like all below */
    uint64_t n_bytes;
    block *lists[CLASSES];
    uint64_t in_use[WORDS]; /* a bit for each list that isn't empty */
};

/* ---- lists by size; with the mutex held */

static uint32_t log2_of(uint32_t n) { return 31 - (uint32_t)__builtin_clz(n); }

/* Sizes of a class are a sixteenth apart at most; below 16 lines it has one. All are less than those of the next. */
static uint32_t class_of(uint32_t lines)
{
    if (lines < SUBS) return lines;
    uint32_t power = log2_of(lines);
    return (power - SUB_BITS + 1) * SUBS + (lines >> (power - SUB_BITS)) % SUBS;
}

static block *at_line(block *b, uint32_t lines) { return (block *)(void *)((char *)b + (size_t)lines * LINE); }

static void list_put(imp_heap *h, block *b)
{
    uint32_t c = class_of(b->lines);
    b->used = false;
    b->prev = NULL;
    b->next = h->lists[c];
    if (b->next) b->next->prev = b;
    h->lists[c] = b;
    h->in_use[c / 64] |= UINT64_C(1) << c % 64;
    ASAN_POISON_MEMORY_REGION(b + 1, (size_t)b->lines * LINE - sizeof *b);
}

static void list_take(imp_heap *h, block *b)
{
    uint32_t c = class_of(b->lines);
    ASAN_UNPOISON_MEMORY_REGION(b + 1, (size_t)b->lines * LINE - sizeof *b);
    if (b->prev) b->prev->next = b->next;
    else h->lists[c] = b->next;
    if (b->next) b->next->prev = b->prev;
    if (!h->lists[c]) h->in_use[c / 64] &= ~(UINT64_C(1) << c % 64);
}

/* A free block of so many lines at least; NULL: none. */
static block *find(const imp_heap *h, uint32_t lines)
{
    uint32_t c = class_of(lines);
    block *b = h->lists[c];
    for (int i = 0; b && i < LOOKS; i++, b = b->next)
        if (b->lines >= lines) return b;
    if (++c == CLASSES) return NULL;
    uint64_t word = h->in_use[c / 64] >> c % 64 << c % 64;
    for (uint32_t w = c / 64; w < WORDS; word = ++w < WORDS ? h->in_use[w] : 0)
        if (word) return h->lists[w * 64 + (uint32_t)__builtin_ctzll(word)];
    return NULL;
}

/* ---- pieces; with the mutex held */

/* One more, as one free block that is in no list yet. NULL: no memory. */
static block *piece_new(imp_heap *h)
{
    piece *p = imp_aligned(LINE, h->piece_bytes);
    if (!p) return NULL;
    *p = (piece){.next = h->pieces, .n_bytes = h->piece_bytes};
    if (p->next) p->next->prev = p;
    h->pieces = p;
    h->n_bytes += p->n_bytes;
    block *b = (block *)(void *)((char *)p + LINE - HEAD);
    b->lines = (uint32_t)(p->n_bytes / LINE - 1);
    b->before = 0;
    b->used = false;
    block *end = at_line(b, b->lines);
    end->lines = 0;
    end->before = b->lines;
    end->used = true;
    return b;
}

/* `b` is all of a piece, and in no list. */
static void piece_free(imp_heap *h, block *b)
{
    piece *p = (piece *)(void *)((char *)b - (LINE - HEAD));
    if (p->prev) p->prev->next = p->next;
    else h->pieces = p->next;
    if (p->next) p->next->prev = p->prev;
    h->n_bytes -= p->n_bytes;
    imp_free(p);
}

/* ---- memory of its own: its size, then a head as in pieces */

static void *own_new(imp_heap *h, size_t n_bytes)
{
    if (n_bytes > SIZE_MAX - LINE) return NULL;
    size_t *size = imp_aligned(LINE, LINE + n_bytes);
    if (!size) return NULL;
    *size = LINE + n_bytes;
    block *b = (block *)(void *)((char *)size + LINE - HEAD);
    b->lines = b->before = 0;
    b->used = true;
    pthread_mutex_lock(&h->mutex);
    h->n_bytes += *size;
    pthread_mutex_unlock(&h->mutex);
    return (char *)b + HEAD;
}

static void own_free(imp_heap *h, block *b)
{
    size_t *size = (size_t *)(void *)((char *)b - (LINE - HEAD));
    pthread_mutex_lock(&h->mutex);
    h->n_bytes -= *size;
    pthread_mutex_unlock(&h->mutex);
    imp_free(size);
}

/* ---- the whole */

imp_heap *imp_heap_new(uint64_t budget)
{
    imp_heap *h = imp_calloc(1, sizeof *h);
    if (!h) return NULL;
    uint64_t n_bytes = budget / PIECES;
    if (n_bytes < LEAST_PIECE) n_bytes = LEAST_PIECE;
    if (n_bytes > MOST_PIECE) n_bytes = MOST_PIECE;
    h->piece_bytes = (size_t)n_bytes / LINE * LINE;
    h->largest = h->piece_bytes / IN_PIECE;
    pthread_mutex_init(&h->mutex, NULL);
    return h;
}

void imp_heap_free(imp_heap *h)
{
    if (!h) return;
    for (piece *next, *p = h->pieces; p; p = next) {
        next = p->next;
        ASAN_UNPOISON_MEMORY_REGION(p, p->n_bytes);
        imp_free(p);
    }
    pthread_mutex_destroy(&h->mutex);
    imp_free(h);
}

void *imp_heap_take(imp_heap *h, size_t n_bytes)
{
    if (n_bytes > h->largest) return own_new(h, n_bytes);
    uint32_t lines = (uint32_t)((HEAD + n_bytes + LINE - 1) / LINE);
    pthread_mutex_lock(&h->mutex);
    block *b = find(h, lines);
    if (b) list_take(h, b);
    else b = piece_new(h);
    if (b && b->lines > lines) {
        block *rest = at_line(b, lines);
        rest->lines = b->lines - lines;
        rest->before = b->lines = lines;
        at_line(rest, rest->lines)->before = rest->lines;
        list_put(h, rest);
    }
    if (b) b->used = true;
    pthread_mutex_unlock(&h->mutex);
    return b ? (char *)b + HEAD : NULL;
}

void imp_heap_give(imp_heap *h, void *memory)
{
    block *b = (block *)(void *)((char *)memory - HEAD);
    if (b->lines == 0) {
        own_free(h, b);
        return;
    }
    pthread_mutex_lock(&h->mutex);
    block *next = at_line(b, b->lines);
    if (!next->used) {
        list_take(h, next);
        b->lines += next->lines;
    }
    if (b->before) {
        block *before = (block *)(void *)((char *)b - (size_t)b->before * LINE);
        if (!before->used) {
            list_take(h, before);
            before->lines += b->lines;
            b = before;
        }
    }
    next = at_line(b, b->lines);
    next->before = b->lines;
    /* One piece stays, for what comes next. */
    if (!b->before && next->lines == 0 && h->pieces->next) piece_free(h, b);
    else list_put(h, b);
    pthread_mutex_unlock(&h->mutex);
}

uint64_t imp_heap_bytes(imp_heap *h)
{
    pthread_mutex_lock(&h->mutex);
    uint64_t n = h->n_bytes;
    pthread_mutex_unlock(&h->mutex);
    return n;
}
