/* pages.h: which pages to read and which tokens to attend to, under two budgets. Pure.
 *
 * A device gives pages, of some tokens each; attention takes tokens. So there is a budget of bytes read and one of
 * cells attended. Pages that are in memory already (the core of a node, what the cache holds) cost nothing. Among the
 * pages that fit the bytes, those are wanted whose tokens will be among the k best of all that arrive; that is found by
 * a price on cells: a page is worth the sum of what its tokens score above the price, per byte. The price is what the
 * last token chosen at the previous price scored, starting from none, for a few rounds; the round that holds the most
 * mass wins.
 *
 * The same input gives the same answer; equals go by the lower page, or the lower token. O(n + pages log pages).
 */
#ifndef IMP_SELECT_PAGES_H
#define IMP_SELECT_PAGES_H

#include <stddef.h>
#include <stdint.h>

typedef struct imp_page_choice {
    const float *scores;   /* [n_tokens], blended; what isn't above 0 counts as 0 */
    size_t n_tokens;
    const uint32_t *page_of; /* [n_tokens]: the page of a token, below n_pages; NULL: token / page_tokens */
    size_t page_tokens;      /* used with page_of NULL, > 0 */
    size_t n_pages;
    const uint32_t *page_bytes;    /* [n_pages]; NULL: 1 each, so that the budget counts pages */
    const unsigned char *resident; /* [n_pages], not 0: in memory; NULL: none */
    uint64_t budget_bytes;
    size_t k;                     /* tokens to choose; at most n_tokens */
    size_t keep_first, keep_last; /* these tokens' pages are read first, and these tokens are chosen if they arrive */
} imp_page_choice;

typedef struct imp_page_result {
    uint64_t bytes;  /* of the pages to read */
    size_t n_read;   /* pages to read */
    size_t n_chosen; /* min(k, n_tokens): exactly */
    double mass;     /* share of all scores that the chosen hold */
} imp_page_result;

typedef struct imp_chooser imp_chooser; /* scratch memory; one thread at a time */

int imp_chooser_new(size_t max_tokens, size_t max_pages, imp_chooser **out);
void imp_chooser_free(imp_chooser *c);

/* read[n_pages]: 1 for pages to read, 0 for others (resident ones too). chosen[k]: rising tokens, all in pages that are
 * read or resident. Where the budget brings fewer than k tokens, the best pages beyond it are read until k are there:
 * every layer of a pass has to fill the same number of cells.
 * IMP_E_ARG: more than the chooser was made for, a page number out of range. */
int imp_choose_pages(imp_chooser *c, const imp_page_choice *choice, unsigned char *read, uint32_t *chosen,
                     imp_page_result *result);

#endif
