/* Two budgets: what must hold whatever the input, and the mass held beside the best of all sets of pages. */
#include "unit/select/select_util.h"

#include "impress/impress.h"
#include <stdbool.h>

#include "select/pages.h"

enum { MAX_PAGES = 40 };

typedef struct problem {
    imp_page_choice choice;
    float *scores;
    uint32_t *page_of, *page_bytes;
    unsigned char *resident, *read;
    uint32_t *chosen;
} problem;

static void make_problem(problem *p, imp_rng *rng, size_t max_pages, bool plain)
{
    imp_page_choice *c = &p->choice;
    size_t page_tokens = 1 + imp_rng_below(rng, 8), n_pages = 1 + imp_rng_below(rng, max_pages);
    size_t n = plain ? page_tokens * n_pages : imp_rng_below(rng, page_tokens * n_pages + 1);
    p->scores = test_alloc(n * sizeof *p->scores);
    p->page_of = test_alloc(n * sizeof *p->page_of);
    p->page_bytes = test_alloc(n_pages * sizeof *p->page_bytes);
    p->resident = test_alloc(n_pages);
    p->read = test_alloc(n_pages);
    memset(p->read, 7, n_pages);
    static const float odd[] = {NAN, INFINITY, -INFINITY, -1.0f, 0.0f};
    uint64_t kind = imp_rng_below(rng, 3);
    for (size_t i = 0; i < n; i++) {
        float u = test_uniform(rng, 0.0f, 1.0f);
        p->scores[i] = kind == 0 ? u : kind == 1 ? expf(-8.0f * u) : (float)imp_rng_below(rng, 3);
        if (!plain && imp_rng_below(rng, 50) == 0) p->scores[i] = odd[imp_rng_below(rng, 5)];
        p->page_of[i] = (uint32_t)imp_rng_below(rng, n_pages);
    }
    uint64_t all = 0;
    for (size_t i = 0; i < n_pages; i++) {
        p->page_bytes[i] = (uint32_t)imp_rng_below(rng, 5000);
        p->resident[i] = imp_rng_below(rng, 4) == 0;
        all += p->page_bytes[i];
    }
    bool has_bytes = !plain && imp_rng_below(rng, 2);
    *c = (imp_page_choice){.scores = p->scores, .n_tokens = n, .page_tokens = page_tokens, .n_pages = n_pages,
                           .k = imp_rng_below(rng, n + 2)};
    if (!plain && imp_rng_below(rng, 2)) c->page_of = p->page_of;
    if (has_bytes) c->page_bytes = p->page_bytes;
    if (imp_rng_below(rng, 2)) c->resident = p->resident;
    c->budget_bytes = imp_rng_below(rng, (has_bytes ? all : n_pages) + 2);
    if (!plain) c->keep_first = imp_rng_below(rng, 5), c->keep_last = imp_rng_below(rng, 5);
    p->chosen = test_alloc((c->k < n ? c->k : n) * sizeof *p->chosen);
}

static void free_problem(problem *p)
{
    imp_free(p->chosen);
    imp_free(p->read);
    imp_free(p->resident);
    imp_free(p->page_bytes);
    imp_free(p->page_of);
    imp_free(p->scores);
}

static size_t page_of(const imp_page_choice *c, size_t i) { return c->page_of ? c->page_of[i] : i / c->page_tokens; }
static bool arrives(const problem *p, size_t page)
{
    return p->read[page] || (p->choice.resident && p->choice.resident[page]);
}
static double counts(float x) { return x > 0.0f ? (isfinite(x) ? (double)x : 3.4028234663852886e38) : 0.0; }
static bool kept(const imp_page_choice *c, size_t i)
{
    return i < c->keep_first || i + c->keep_last >= c->n_tokens;
}

static void invariants(void **state)
{
    (void)state;
    imp_rng rng = test_rng("invariants");
    imp_chooser *chooser;
    assert_int_equal(imp_chooser_new(8 * MAX_PAGES, MAX_PAGES, &chooser), 0);
    for (int round = 0; round < 5000; round++) {
        problem p;
        make_problem(&p, &rng, MAX_PAGES, false);
        const imp_page_choice *c = &p.choice;
        imp_page_result r;
        assert_int_equal(imp_choose_pages(chooser, c, p.read, p.chosen, &r), 0);
        size_t k = c->k < c->n_tokens ? c->k : c->n_tokens, n_read = 0, n_arrived = 0;
        uint64_t bytes = 0;
        for (size_t i = 0; i < c->n_pages; i++) {
            assert_true(p.read[i] <= 1);
            if (!p.read[i]) continue;
            assert_false(c->resident && c->resident[i]);
            n_read++;
            bytes += c->page_bytes ? c->page_bytes[i] : 1;
        }
        for (size_t i = 0; i < c->n_tokens; i++) n_arrived += arrives(&p, page_of(c, i));
        assert_true(r.bytes == bytes && r.n_read == n_read && r.n_chosen == k && n_arrived >= k);

        /* Beyond the budget only as far as k tokens take: before the last page that was read there were too few. */
        if (bytes > c->budget_bytes) {
            size_t most = 0;
            for (size_t page = 0; page < c->n_pages; page++) {
                size_t n = 0;
                for (size_t i = 0; i < c->n_tokens; i++) n += page_of(c, i) == page;
                if (p.read[page] && n > most) most = n;
            }
            assert_true(n_arrived - most < k);
        }
        /* The chosen arrive, rise, and no token that arrived is better than one of them (kept ones are best of all). */
        double held = 0.0, all = 0.0, worst = HUGE_VAL, best_left = -1.0;
        size_t w = 0;
        for (size_t i = 0; i < c->n_tokens; i++) {
            all += counts(c->scores[i]);
            bool chosen = w < k && p.chosen[w] == i;
            if (chosen) w++, held += counts(c->scores[i]);
            if (!arrives(&p, page_of(c, i))) {
                assert_false(chosen);
                continue;
            }
            double rank = kept(c, i) ? HUGE_VAL : counts(c->scores[i]);
            if (chosen && rank < worst) worst = rank;
            if (!chosen && rank > best_left) best_left = rank;
        }
        assert_int_equal(w, k);
        if (k > 0) assert_true(worst >= best_left);
        double mass = k == c->n_tokens ? 1.0 : all > 0.0 ? held / all : 0.0;
        assert_true(fabs(r.mass - mass) < 1e-9);

        imp_page_result again;
        unsigned char *read = test_alloc(c->n_pages);
        uint32_t *chosen = test_alloc(k * sizeof *chosen);
        assert_int_equal(imp_choose_pages(chooser, c, read, chosen, &again), 0);
        assert_memory_equal(read, p.read, c->n_pages);
        assert_memory_equal(chosen, p.chosen, k * sizeof *chosen);

        /* With room for everything: just the best k. */
        imp_page_choice roomy = *c;
        roomy.budget_bytes = UINT64_MAX;
        roomy.keep_first = roomy.keep_last = 0;
        assert_int_equal(imp_choose_pages(chooser, &roomy, read, chosen, &again), 0);
        assert_true(again.mass >= r.mass - 1e-12);
        imp_free(chosen);
        imp_free(read);
        free_problem(&p);
    }
    imp_chooser_free(chooser);
}

static int falling(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The most mass that any set of pages within the budget holds. */
static double best_of_all(const imp_page_choice *c)
{
    double best = 0.0, all = 0.0;
    float got[8 * 12];
    for (size_t i = 0; i < c->n_tokens; i++) all += (double)c->scores[i];
    for (unsigned set = 0; set < 1u << c->n_pages; set++) {
        uint64_t bytes = 0;
        size_t n = 0;
        for (size_t page = 0; page < c->n_pages; page++) {
            bytes += (set >> page & 1u) && !(c->resident && c->resident[page]);
        }
        if (bytes > c->budget_bytes) continue;
        for (size_t i = 0; i < c->n_tokens; i++) {
            size_t page = page_of(c, i);
            if ((set >> page & 1u) || (c->resident && c->resident[page])) got[n++] = c->scores[i];
        }
        qsort(got, n, sizeof *got, falling);
        double held = 0.0;
        for (size_t i = 0; i < n && i < c->k; i++) held += (double)got[i];
        if (held > best) best = held;
    }
    return all > 0.0 ? best / all : 0.0;
}

static void near_the_best(void **state)
{
    (void)state;
    imp_rng rng = test_rng("near_the_best");
    imp_chooser *chooser;
    assert_int_equal(imp_chooser_new(8 * 12, 12, &chooser), 0);
    double sum = 0.0, best_sum = 0.0;
    for (int round = 0; round < 300; round++) {
        problem p;
        make_problem(&p, &rng, 10, true);
        imp_page_result r;
        assert_int_equal(imp_choose_pages(chooser, &p.choice, p.read, p.chosen, &r), 0);
        double best = best_of_all(&p.choice);
        if (r.bytes <= p.choice.budget_bytes && best > 0.0) {
            assert_true(r.mass <= best + 1e-6);
            assert_true(r.mass >= 0.75 * best - 1e-9);
            sum += r.mass;
            best_sum += best;
        }
        free_problem(&p);
    }
    printf("mass held: %.4f of the best\n", sum / best_sum);
    assert_true(sum >= 0.98 * best_sum);
    imp_chooser_free(chooser);
}

static void bad_calls(void **state)
{
    (void)state;
    imp_chooser *chooser;
    float scores[8] = {0};
    uint32_t page[8] = {0, 0, 0, 0, 0, 0, 0, 2}, chosen[8];
    unsigned char read[2];
    imp_page_result r;
    assert_int_equal(imp_chooser_new(8, 2, &chooser), 0);
    imp_page_choice c = {.scores = scores, .n_tokens = 8, .page_tokens = 4, .n_pages = 2, .k = 2};
    assert_int_equal(imp_choose_pages(chooser, &c, read, chosen, &r), 0);
    c.page_tokens = 0;
    assert_int_equal(imp_choose_pages(chooser, &c, read, chosen, &r), IMP_E_ARG);
    c.page_of = page;
    assert_int_equal(imp_choose_pages(chooser, &c, read, chosen, &r), IMP_E_ARG);
    page[7] = 1;
    assert_int_equal(imp_choose_pages(chooser, &c, read, chosen, &r), 0);
    c.n_tokens = 9;
    assert_int_equal(imp_choose_pages(chooser, &c, read, chosen, &r), IMP_E_ARG);
    c.n_tokens = 0;
    assert_int_equal(imp_choose_pages(chooser, &c, read, chosen, &r), 0);
    assert_int_equal(r.n_chosen, 0);
    imp_chooser_free(chooser);
    imp_chooser_free(NULL);
}

static void no_memory(void **state)
{
    (void)state;
    imp_chooser *c;
    int failed = 0;
    for (uint64_t at = 1;; at++) {
        imp_alloc_fail_at(at, 0);
        int rc = imp_chooser_new(100, 10, &c);
        imp_alloc_fail_at(0, 0);
        if (rc == 0) break;
        assert_int_equal(rc, IMP_E_NOMEM);
        assert_null(c);
        failed++;
    }
    assert_true(failed > 5);
    imp_chooser_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(invariants),
        cmocka_unit_test(near_the_best),
        cmocka_unit_test(bad_calls),
        cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
