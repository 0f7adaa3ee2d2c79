/* Lazy grammars, on plans made by hand: when they wake, and when not. */
#include "chat_fixture.h"

#include <sys/stat.h>
#include <unistd.h>

#include "serve/chat_mute.h"

static struct llama_model *m;
static char *calls[] = {"<call>", "[CALL]"}, *ends[] = {"</think>", "</thought>"};
#if IMPRESS_HAVE_LLAMA_COMMON
static char *patterns[] = {"to=([a-z]+:)"};
#endif

/* A call is <call>, digits, ";". */
static chat_plan plan_of(bool think, const char *prefill)
{
    chat_plan p = {.way = &chat_way_plain, .vocab = llama_model_get_vocab(m)};
#if IMPRESS_HAVE_LLAMA_COMMON
    p.way = &chat_way_common;
#endif
    p.r.grammar = "root ::= (\"<call>\" | \"[CALL]\") [0-9]+ \";\"";
    p.r.lazy = true;
    p.r.words = (chat_texts){calls, 2};
    p.r.prefill = (char *)(uintptr_t)prefill;
    if (think) {
        p.r.think_start = "<think>";
        p.r.think_ends = (chat_texts){ends, 2};
    }
    return p;
}

static const struct {
    bool think;
    const char *prefill, *text;
    int taken; /* -1: all, and then the end */
} cases[] = {
    {false, NULL, "", -1},
    {false, NULL, "any text < call > <cal", -1},
    {false, NULL, "<call>12;", -1},
    {false, NULL, "[CALL]1;", -1},
    {false, NULL, "I call <call>12;", -1},
    {false, NULL, "<<call>12;", -1},
    {false, NULL, "<ca<call>1;", -1},
    {false, NULL, "<call>x", 6},
    {false, NULL, "I call <call>1x", 14},
    {false, NULL, "<call>12", 8}, /* no end inside a call */
    {false, NULL, "<call>12; and", 9},
    {false, NULL, "<think><call>x", 13}, /* no reasoning known */
    {true, NULL, "<call>x", 6},
    {true, NULL, "<think>I could <call>x or [CALL]y</think>no", -1},
    {true, NULL, "<think>hm</think><call>1;", -1},
    {true, NULL, "<think><call>x</thought><call>x", 30},
    {true, NULL, "<think>a</think>b<think><call>x</think><call>x", 45},
    {true, NULL, "text <call>1;", -1},
    {true, NULL, "<think>never ends <call>x", -1},
    {true, "<a>\n<think>\n", "<call>x</think><call>x", 21}, /* the prompt began it */
    {true, "<think>\n\n</think>\n", "<call>x", 6},
};

static void test_words(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        chat_plan p = plan_of(cases[i].think, cases[i].prefill);
        size_t taken;
        bool all = grammar_takes(m, &p, cases[i].text, &taken);
        if (all != (cases[i].taken == -1) || (!all && taken != (size_t)cases[i].taken))
            fail_msg("%s: %d, %zu bytes", cases[i].text, all, taken);
    }
}

/* Asleep, nothing is forbidden; awake, all candidates agree with single ones. */
static void test_candidates(void **unused)
{
    (void)unused;
    chat_plan p = plan_of(false, NULL);
    chat_grammar *g;
    oai_error e;
    assert_int_equal(chat_grammar_new(&p, &g, &e), 0);
    llama_token_data data[N_BYTES + N_SPECIAL];
    for (const char *s = "a<call>1"; *s; s++) {
        size_t n_allowed = 0;
        for (llama_token k = 0; k < N_BYTES + N_SPECIAL; k++) data[k] = (llama_token_data){.id = k};
        chat_grammar_apply(g, &(llama_token_data_array){.data = data, .size = N_BYTES + N_SPECIAL, .selected = -1});
        for (llama_token k = 0; k < N_BYTES + N_SPECIAL; k++) {
            assert_int_equal(data[k].logit == 0, chat_grammar_allows(g, k));
            n_allowed += data[k].logit == 0;
        }
        assert_int_equal(n_allowed, *s == '1' ? 10 : N_BYTES + N_SPECIAL);
        assert_true(chat_grammar_accept(g, (llama_token)(unsigned char)*s));
    }
    chat_grammar_free(g);
}

static llama_token token_of(const char *text)
{
    llama_token token;
    assert_int_equal(llama_tokenize(llama_model_get_vocab(m), text, (int32_t)strlen(text), &token, 1, false, true), 1);
    return token;
}

#if IMPRESS_HAVE_LLAMA_COMMON
/* A trigger and something else in one token. */
static void test_more_than_the_trigger(void **unused)
{
    (void)unused;
    char *words[] = {"tool_c"};
    for (int fits = 0; fits < 2; fits++) {
        chat_plan p = plan_of(false, NULL);
        p.r.words = (chat_texts){words, 1};
        p.r.grammar = fits ? "root ::= \"tool_call>\" [0-9]" : "root ::= \"tool_c\" [0-9]";
        chat_grammar *g;
        oai_error e;
        assert_int_equal(chat_grammar_new(&p, &g, &e), 0);
        assert_true(chat_grammar_accept(g, token_of("<tool_call>")));
        assert_true(chat_grammar_allows(g, '1'));
        /* what doesn't fit is no call, and stays free */
        assert_int_equal(chat_grammar_allows(g, 'x'), !fits);
        assert_true(chat_grammar_accept(g, '1'));
        assert_true(chat_grammar_accept(g, END));
        chat_grammar_free(g);
    }
}

/* By llama.cpp's own search. The grammar begins with the group. */
static void test_patterns(void **unused)
{
    (void)unused;
    static const struct {
        bool think;
        const char *text;
        int taken;
    } texts[] = {
        {false, "plain text", -1},
        {false, "so to=f:12;", -1},
        {false, "so to=f:x", 8},
        {false, "so to=f:12", 10},
        {true, "<think>to=f:x</think>done", -1},
        {true, "<think>to=f:x</think>to=f:x", 26},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        chat_plan p = plan_of(texts[i].think, NULL);
        p.r.grammar = "root ::= [a-z]+ \":\" [0-9]+ \";\"";
        p.r.words.n = 0;
        p.r.patterns = (chat_texts){patterns, 1};
        size_t taken;
        bool all = grammar_takes(m, &p, texts[i].text, &taken);
        if (all != (texts[i].taken == -1) || (!all && taken != (size_t)texts[i].taken))
            fail_msg("%s: %d, %zu bytes", texts[i].text, all, taken);
    }
}

/* A long answer without a trigger: its search ends, and a call that has begun goes on. */
static void test_long_answers(void **unused)
{
    (void)unused;
    for (int woken = 0; woken < 2; woken++) {
        for (int by_pattern = 0; by_pattern < 2; by_pattern++) {
            chat_plan p = plan_of(true, NULL);
            p.r.grammar = by_pattern ? "root ::= [a-z]+ \":\" [0-9]+ \";\"" : "root ::= \"<call>\" [0-9]+ \";\"";
            if (by_pattern) {
                p.r.words.n = 0;
                p.r.patterns = (chat_texts){patterns, 1};
            }
            chat_grammar *g;
            oai_error e;
            assert_int_equal(chat_grammar_new(&p, &g, &e), 0);
            for (const char *s = !woken ? "" : by_pattern ? "to=f:" : "<call>"; *s; s++)
                assert_true(chat_grammar_accept(g, (llama_token)(unsigned char)*s));
            for (int i = 0; i < (by_pattern && !woken ? 17000 : 20000); i++)
                assert_true(chat_grammar_accept(g, woken ? '1' : 'a' + i % 20));
            assert_int_equal(chat_grammar_allows(g, 'x'), !woken);
            assert_true(chat_grammar_accept(g, woken ? ';' : 'x'));
            assert_true(chat_grammar_accept(g, END));
            chat_grammar_free(g);
        }
    }
}
#endif

/* What a required call begins with comes first, although the grammar lets a text come before it. */
static void test_beginning(void **unused)
{
    (void)unused;
    chat_plan p = plan_of(false, "user:");
    p.r.lazy = false;
    p.r.grammar = "root ::= \"user:\" [a-z ]* \"<call>\" [0-9]+ \";\"";
    assert_true(grammar_takes(m, &p, "so <call>1;", NULL));
    p.r.begin = "<call>";
    size_t taken;
    assert_true(grammar_takes(m, &p, "<call>1;", NULL));
    assert_false(grammar_takes(m, &p, "so <call>1;", &taken));
    assert_int_equal(taken, 0);
    assert_false(grammar_takes(m, &p, "<cx", &taken));
    assert_int_equal(taken, 2);
    p.r.begin = "<tool_call>\n";
    p.r.grammar = "root ::= \"user:\" [^x]*";
    chat_grammar *g;
    oai_error e;
    assert_int_equal(chat_grammar_new(&p, &g, &e), 0);
    assert_true(chat_grammar_allows(g, '<') && chat_grammar_allows(g, token_of("<tool_call>")));
    assert_false(chat_grammar_allows(g, 'a') || chat_grammar_allows(g, END));
    assert_true(chat_grammar_accept(g, token_of("<tool_call>")));
    assert_true(chat_grammar_allows(g, token_of("\n")));
    assert_false(chat_grammar_allows(g, 'a'));
    chat_grammar_free(g);

    /* a prompt that its grammar can't take in */
    p.r.prefill = "other";
    assert_int_equal(chat_grammar_new(&p, &g, &e), -1);
    assert_int_equal(e.status, 500);
}

/* ---- standard error ---- */

static bool muted(void)
{
    struct stat now, nowhere;
    assert_int_equal(fstat(STDERR_FILENO, &now), 0);
    assert_int_equal(stat("/dev/null", &nowhere), 0);
    return now.st_dev == nowhere.st_dev && now.st_ino == nowhere.st_ino;
}

/* The second doesn't wait for the first, and the last opens it again. */
static void test_mutes_overlap(void **unused)
{
    (void)unused;
    bool before = muted();
    alarm(60); /* one that waits does so for good */
    for (int round = 0; round < 2; round++) {
        chat_mute();
        assert_true(muted());
        chat_mute();
        chat_unmute();
        assert_true(muted());
        chat_unmute();
        assert_int_equal(muted(), before);
    }
    alarm(0);
}

static int setup(void **unused)
{
    (void)unused;
    m = make_model(NULL, false);
    return 0;
}

static int teardown(void **unused)
{
    (void)unused;
    llama_model_free(m);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_candidates),
        cmocka_unit_test(test_beginning),
        cmocka_unit_test(test_mutes_overlap),
#if IMPRESS_HAVE_LLAMA_COMMON
        cmocka_unit_test(test_more_than_the_trigger),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_long_answers),
#endif
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
