/* pages.c: pages by worth per byte, tokens by score, and the price on cells that ties the two. */
#include "select/pages.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/status.h"
#include "select/select.h"

/* What more rounds find is within a thousandth of the mass. */
enum { ROUNDS = 3 };

typedef struct page {
    double worth; /* per byte, at the present price */
    double plain; /* per byte, without a price: for pages beyond the budget */
    uint64_t n_bytes;
    size_t n_tokens;
    uint32_t id;
    bool needed; /* holds tokens to be kept */
} page;

struct imp_chooser {
    size_t max_tokens, max_pages;
    page *pages;        /* [max_pages] */
    double *worth, *plain; /* [max_pages], by id */
    size_t *n_tokens;   /* [max_pages] */
    unsigned char *needed, *read; /* [max_pages] */
    float *scores;      /* [max_tokens], what isn't above 0 made 0 */
    float *arrived;     /* [max_tokens], -inf for tokens that don't arrive */
    float *scratch;     /* [max_tokens] */
    uint32_t *chosen;   /* [max_tokens] */
};

int imp_chooser_new(size_t max_tokens, size_t max_pages, imp_chooser **out)
{
    *out = NULL;
    imp_chooser *c = imp_calloc(1, sizeof *c);
    if (c) {
        c->max_tokens = max_tokens;
        c->max_pages = max_pages;
        c->pages = imp_calloc(max_pages, sizeof *c->pages);
        c->worth = imp_calloc(max_pages, sizeof *c->worth);
        c->plain = imp_calloc(max_pages, sizeof *c->plain);
        c->n_tokens = imp_calloc(max_pages, sizeof *c->n_tokens);
        c->needed = imp_calloc(max_pages, 1);
        c->read = imp_calloc(max_pages, 1);
        c->scores = imp_calloc(max_tokens, sizeof *c->scores);
        c->arrived = imp_calloc(max_tokens, sizeof *c->arrived);
        c->scratch = imp_calloc(max_tokens, sizeof *c->scratch);
        c->chosen = imp_calloc(max_tokens, sizeof *c->chosen);
    }
    if (!c || !c->pages || !c->worth || !c->plain || !c->n_tokens || !c->needed || !c->read || !c->scores ||
        !c->arrived || !c->scratch || !c->chosen) {
        imp_chooser_free(c);
        return imp_fail(IMP_E_NOMEM, "no memory to choose among %zu tokens", max_tokens);
    }
    *out = c;
    return 0;
}

void imp_chooser_free(imp_chooser *c)
{
    if (!c) return;
    imp_free(c->chosen);
    imp_free(c->scratch);
    imp_free(c->arrived);
    imp_free(c->scores);
    imp_free(c->read);
    imp_free(c->needed);
    imp_free(c->n_tokens);
    imp_free(c->plain);
    imp_free(c->worth);
    imp_free(c->pages);
    imp_free(c);
}

static size_t page_of(const imp_page_choice *choice, size_t token)
{
    return choice->page_of ? choice->page_of[token] : token / choice->page_tokens;
}

static bool is_kept(const imp_page_choice *choice, size_t token)
{
    return token < choice->keep_first || choice->n_tokens - token <= choice->keep_last;
}

static bool is_resident(const imp_page_choice *choice, size_t id) { return choice->resident && choice->resident[id]; }

static int compare_worth(const void *a, const void *b)
{
    const page *x = a, *y = b;
    if (x->needed != y->needed) return x->needed ? -1 : 1;
    if (x->worth > y->worth || x->worth < y->worth) return x->worth > y->worth ? -1 : 1;
    if (x->plain > y->plain || x->plain < y->plain) return x->plain > y->plain ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Fills c->read for one price; returns the bytes. */
static uint64_t choose_reads(imp_chooser *c, const imp_page_choice *choice, float price)
{
    memset(c->worth, 0, choice->n_pages * sizeof *c->worth);
    for (size_t i = 0; i < choice->n_tokens; i++) {
        if (c->scores[i] > price) c->worth[page_of(choice, i)] += (double)(c->scores[i] - price);
    }
    size_t n = 0, n_arrived = 0;
    for (size_t id = 0; id < choice->n_pages; id++) {
        c->read[id] = 0;
        if (is_resident(choice, id)) {
            n_arrived += c->n_tokens[id];
            continue;
        }
        uint64_t n_bytes = choice->page_bytes ? choice->page_bytes[id] : 1;
        double per_byte = 1.0 / (double)(n_bytes > 0 ? n_bytes : 1);
        c->pages[n++] = (page){c->worth[id] * per_byte, c->plain[id] * per_byte, n_bytes, c->n_tokens[id],
                               (uint32_t)id, c->needed[id] != 0};
    }
    qsort(c->pages, n, sizeof *c->pages, compare_worth);
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        const page *p = &c->pages[i];
        if (!p->needed && !(p->worth > 0.0)) break;
        if (p->n_bytes > choice->budget_bytes - bytes) continue;
        c->read[p->id] = 1;
        bytes += p->n_bytes;
        n_arrived += p->n_tokens;
    }
    for (size_t i = 0; i < n && n_arrived < choice->k; i++) {
        const page *p = &c->pages[i];
        if (c->read[p->id] || p->n_tokens == 0) continue;
        c->read[p->id] = 1;
        bytes += p->n_bytes;
        n_arrived += p->n_tokens;
    }
    return bytes;
}

/* The k best tokens that arrive, in c->chosen; returns what they score in all, and the least that one not kept
 * scores. */
static double choose_tokens(imp_chooser *c, const imp_page_choice *choice, size_t k, float *least)
{
    for (size_t i = 0; i < choice->n_tokens; i++) {
        size_t id = page_of(choice, i);
        bool arrives = c->read[id] || is_resident(choice, id);
        c->arrived[i] = !arrives ? -HUGE_VALF : is_kept(choice, i) ? HUGE_VALF : c->scores[i];
    }
    imp_top_k(c->arrived, choice->n_tokens, k, 0, 0, c->chosen, NULL, c->scratch);
    double held = 0.0;
    *least = HUGE_VALF;
    for (size_t i = 0; i < k; i++) {
        float score = c->scores[c->chosen[i]];
        held += (double)score;
        if (!is_kept(choice, c->chosen[i]) && score < *least) *least = score;
    }
    return held;
}

int imp_choose_pages(imp_chooser *c, const imp_page_choice *choice, unsigned char *read, uint32_t *chosen,
                     imp_page_result *result)
{
    *result = (imp_page_result){0};
    if (choice->n_tokens > c->max_tokens || choice->n_pages > c->max_pages ||
        (!choice->page_of && choice->page_tokens == 0)) {
        return imp_fail(IMP_E_ARG, "%zu tokens in %zu pages: more than the chooser was made for", choice->n_tokens,
                        choice->n_pages);
    }
    memset(c->plain, 0, choice->n_pages * sizeof *c->plain);
    memset(c->n_tokens, 0, choice->n_pages * sizeof *c->n_tokens);
    memset(c->needed, 0, choice->n_pages);
    double all = 0.0;
    for (size_t i = 0; i < choice->n_tokens; i++) {
        size_t id = page_of(choice, i);
        if (id >= choice->n_pages) {
            return imp_fail(IMP_E_ARG, "token %zu lies in page %zu of %zu", i, id, choice->n_pages);
        }
        float score = choice->scores[i];
        c->scores[i] = score > 0.0f ? (score < FLT_MAX ? score : FLT_MAX) : 0.0f;
        c->plain[id] += (double)c->scores[i];
        c->n_tokens[id]++;
        if (is_kept(choice, i)) c->needed[id] = 1;
        all += (double)c->scores[i];
    }

    const size_t k = choice->k < choice->n_tokens ? choice->k : choice->n_tokens;
    imp_page_choice exact = *choice;
    exact.k = k;
    float price = 0.0f;
    double best = -1.0;
    for (int round = 0; round < ROUNDS; round++) {
        float least;
        uint64_t bytes = choose_reads(c, &exact, price);
        double held = choose_tokens(c, &exact, k, &least);
        if (held > best) {
            best = held;
            result->bytes = bytes;
            memcpy(read, c->read, choice->n_pages);
            memcpy(chosen, c->chosen, k * sizeof *chosen);
        }
        if (!(least < HUGE_VALF) || (least >= price && least <= price)) break;
        price = least;
    }
    for (size_t id = 0; id < choice->n_pages; id++) result->n_read += read[id];
    result->n_chosen = k;
    result->mass = k == choice->n_tokens ? 1.0 : all > 0.0 ? best / all : 0.0;
    return 0;
}
