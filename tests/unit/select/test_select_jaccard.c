/* Similarity of sets and votes against twins that count with flags and sort everything. */
#include "unit/select/select_util.h"

#include "select/jaccard.h"

enum { MAX_N = 200, MAX_SETS = 6 };

typedef struct sets {
    size_t n, n_sets;
    unsigned char has[MAX_SETS][MAX_N];
    uint32_t *indices[MAX_SETS]; /* of exactly the right size */
    imp_index_set set[MAX_SETS];
} sets;

static void make_sets(sets *s, imp_rng *rng)
{
    s->n = 1 + imp_rng_below(rng, MAX_N);
    s->n_sets = imp_rng_below(rng, MAX_SETS + 1);
    for (size_t i = 0; i < s->n_sets; i++) {
        uint64_t chance = imp_rng_below(rng, 5);
        size_t k = 0;
        for (size_t j = 0; j < s->n; j++) k += s->has[i][j] = imp_rng_below(rng, 4) < chance;
        s->indices[i] = test_alloc(k * sizeof(uint32_t));
        s->set[i] = (imp_index_set){s->indices[i], k};
        for (size_t j = 0, w = 0; j < s->n; j++) {
            if (s->has[i][j]) s->indices[i][w++] = (uint32_t)j;
        }
    }
}

static void free_sets(sets *s)
{
    for (size_t i = 0; i < s->n_sets; i++) imp_free(s->indices[i]);
}

static double twin_jaccard(const sets *s, size_t a, size_t b)
{
    int both = 0, either = 0;
    for (size_t j = 0; j < s->n; j++) {
        both += s->has[a][j] && s->has[b][j];
        either += s->has[a][j] || s->has[b][j];
    }
    return either ? (double)both / either : 1.0;
}

static void similarity(void **state)
{
    (void)state;
    imp_rng rng = test_rng("similarity");
    for (int round = 0; round < 2000; round++) {
        sets s;
        make_sets(&s, &rng);
        double sum = 0.0;
        int pairs = 0;
        for (size_t a = 0; a < s.n_sets; a++) {
            for (size_t b = 0; b < s.n_sets; b++) {
                double want = twin_jaccard(&s, a, b);
                assert_true(imp_jaccard(s.set[a], s.set[b]) == want);
                if (a < b) sum += want, pairs++;
            }
        }
        assert_true(fabs(imp_jaccard_mean(s.set, s.n_sets) - (pairs ? sum / pairs : 1.0)) < 1e-12);
        free_sets(&s);
    }
    assert_true(imp_jaccard_mean(NULL, 0) == 1.0);
}

/* The formula against sets that are really drawn at random. */
static void chance(void **state)
{
    (void)state;
    imp_rng rng = test_rng("chance");
    assert_true(fabs(imp_jaccard_random(25, 100) - 1.0 / 7.0) < 1e-12);
    assert_true(imp_jaccard_random(0, 10) == 0.0);
    assert_true(imp_jaccard_random(10, 10) == 1.0 && imp_jaccard_random(11, 10) == 1.0);
    assert_true(imp_jaccard_random(0, 0) == 1.0);
    enum { N = 1000, DRAWS = 200 };
    static const size_t ks[] = {50, 250, 500, 900};
    for (int c = 0; c < 4; c++) {
        double sum = 0.0;
        for (int draw = 0; draw < DRAWS; draw++) {
            uint32_t set[2][N];
            for (int i = 0; i < 2; i++) {
                size_t left = ks[c], w = 0; /* each next index with the chance that keeps the sets uniform */
                for (uint32_t j = 0; j < N; j++) {
                    if (imp_rng_below(&rng, N - j) < left) set[i][w++] = j, left--;
                }
                assert_int_equal(w, ks[c]);
            }
            sum += imp_jaccard((imp_index_set){set[0], ks[c]}, (imp_index_set){set[1], ks[c]});
        }
        /* a draw's deviation is below 0.02, so this is more than 7 of the mean's */
        assert_true(fabs(sum / DRAWS - imp_jaccard_random(ks[c], N)) < 0.01);
    }
}

static const sets *sort_sets;
static const float *sort_scores;

static int votes_for(uint32_t token)
{
    int votes = 0;
    for (size_t i = 0; i < sort_sets->n_sets; i++) votes += sort_sets->has[i][token];
    return votes;
}

static int better_first(const void *a, const void *b)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    int vi = votes_for(i), vj = votes_for(j);
    if (vi != vj) return vj - vi;
    float x = sort_scores[i], y = sort_scores[j];
    if (isnan(x) != isnan(y)) return isnan(x) ? 1 : -1;
    if (x > y || x < y) return x > y ? -1 : 1;
    return (i > j) - (i < j);
}

static int rising(const void *a, const void *b)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    return (i > j) - (i < j);
}

static void voting(void **state)
{
    (void)state;
    imp_rng rng = test_rng("voting");
    for (int round = 0; round < 3000; round++) {
        sets s;
        make_sets(&s, &rng);
        size_t n = s.n, k = imp_rng_below(&rng, n + 3), kept = k < n ? k : n;
        float *scores = test_alloc(n * sizeof *scores), *scratch = test_alloc(2 * n * sizeof *scratch);
        uint32_t *out = test_alloc(kept * sizeof *out), *votes = test_alloc(n * sizeof *votes);
        uint32_t order[MAX_N];
        unsigned kind = (unsigned)imp_rng_below(&rng, 3);
        for (size_t i = 0; i < n; i++) {
            scores[i] = kind == 0 ? test_uniform(&rng, 0.0f, 1.0f) : (float)imp_rng_below(&rng, 3);
            if (kind == 2 && scores[i] > 1.0f) scores[i] = NAN;
            order[i] = (uint32_t)i;
        }
        imp_vote(s.set, s.n_sets, scores, n, k, out, votes, scratch);
        sort_sets = &s;
        sort_scores = scores;
        qsort(order, n, sizeof *order, better_first);
        qsort(order, kept, sizeof *order, rising);
        assert_memory_equal(out, order, kept * sizeof *out);
        imp_free(votes);
        imp_free(out);
        imp_free(scratch);
        imp_free(scores);
        free_sets(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(similarity),
        cmocka_unit_test(chance),
        cmocka_unit_test(voting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
