/* Grammars, on plans made by hand: lazy ones, when they wake, and when not; and what is refused for what it would
 * cost. */
#include "chat_fixture.h"

#include <sys/stat.h>
#include <unistd.h>

#include "serve/chat_gbnf.h"
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
    assert_int_equal(e.status, 400);
}

/* ---- what a grammar costs ---- */

/* A grammar of `n` rules, each made of the next by `body`, in which % stands for it. */
static char *levels(int n, const char *body, const char *last, const char *root)
{
    size_t room = 1000 + (size_t)n * (strlen(body) + 40), at = 0;
    char *out = malloc(room);
    assert_non_null(out);
    for (int i = 1; i < n; i++) {
        at += (size_t)snprintf(out + at, room - at, "r%d ::= ", i);
        for (const char *s = body; *s; s++) {
            if (s[0] == '%') at += (size_t)snprintf(out + at, room - at, "r%d", i + 1);
            else out[at++] = *s;
        }
        out[at++] = '\n';
    }
    snprintf(out + at, room - at, "r%d ::= %s\nroot ::= %s\n", n, last, root);
    return out;
}

static char *repeated(const char *head, const char *part, int n, const char *tail)
{
    size_t room = strlen(head) + (size_t)n * strlen(part) + strlen(tail) + 1;
    char *out = malloc(room), *at = out;
    assert_non_null(out);
    at += sprintf(at, "%s", head);
    for (int i = 0; i < n; i++) at += sprintf(at, "%s", part);
    sprintf(at, "%s", tail);
    return out;
}

/* Refused with `part` in the message, by itself and as a client's. Takes the text over. */
static void refuse_grammar(char *text, const char *part)
{
    const char *fault = chat_gbnf_fault(text, true, NULL);
    if (!fault || !strstr(fault, part)) fail_msg("%.200s: %s", text, fault ? fault : "taken");
    for (int own = 0; own < 2; own++) {
        chat_plan p = plan_of(false, NULL);
        p.r.lazy = false;
        p.r.grammar = text;
        p.own_grammar = own;
        chat_grammar *g;
        oai_error e = {0};
        assert_int_equal(chat_grammar_new(&p, &g, &e), -1);
        assert_null(g);
        assert_int_equal(e.status, 400);
        assert_string_equal(e.code, "invalid_grammar");
        assert_non_null(strstr(e.message, part));
        assert_true(own ? !strcmp(e.param, "grammar") : !e.param[0]);
    }
    free(text);
}

/* Each of these would keep llama.cpp busy for hours, or take all memory or the whole stack. */
static void test_endless_grammars(void **unused)
{
    (void)unused;
    refuse_grammar(levels(45, "% % | \"\"", "\"a\" | \"\"", "r1"), "ways");
    refuse_grammar(levels(30, "% | %", "\"a\"", "r1"), "ways");
    refuse_grammar(levels(20, "% % | \"\"", "\"a\" | \"\"", "\"[\" r1"), "ways");
    refuse_grammar(levels(200000, "%", "\"a\"", "r1"), "ways");
    refuse_grammar(strdup("root ::= (((((\"a\"?){0,99}){0,99}){0,99}){0,99}){0,99}"), "ways");
    refuse_grammar(repeated("e ::= \"\" | \"z\"\nf ::= e e\nroot ::= \"[\" ", "(f f f) ", 6000, "\"]\""),
                   "ways");
    /* left recursion behind what is empty only in the end: its stack grows and grows */
    static const char *const recursive[] = {
        "root ::= \"[\" a\na ::= b a \"x\" | \"y\"\nb ::= c c\nc ::= \"\" | \"z\"",
        "root ::= a\na ::= \"x\" | b \"y\"\nb ::= \"z\" | e a\ne ::= \"\" | \"w\"",
        "root ::= \"a\" | root \"a\"",
    };
    for (size_t i = 0; i < sizeof recursive / sizeof recursive[0]; i++)
        refuse_grammar(strdup(recursive[i]), "left recursive");
    /* memory */
    refuse_grammar(strdup("root ::= \"a\"{5,3}"), "fewer times");
    refuse_grammar(repeated("root ::= \"", "abcdefghij", 100000, "\"{2000}"), "repeats too much");
    refuse_grammar(repeated("root ::= ", "(\"a\"{2000})", 5000, ""), "repeats too much");
    char *name = repeated("n", "ame", 300000, " ::= ");
    refuse_grammar(repeated(name, "\"a\"? ", 1000, "\nroot ::= \"b\""), "repeats too much");
    free(name);
    refuse_grammar(repeated("root ::= ", "(", 200000, ""), "parentheses");
}

/* Ordinary ones pass, far from the bounds. */
static void test_ordinary_grammars(void **unused)
{
    (void)unused;
    static const char *const texts[] = {
        chat_json_grammar,
        "root ::= \"a\"",
        "# c\r\n\r\nroot\t::= # c\n ( x # c\n | y ) # c\nx ::= "
        "[^\\]\\-a-z\\x41\\u00e9\\U0001F600-] . \"\\\"\\n\"\n"
        "y::=x{2}x{1,}x{0,3}x*x+x?",
        "root ::= ([a-z]*)*",
        "root ::= (\"a\"? (\"b\"? | \"c\"*))* \"d\"",
        "root ::= \"[\" (root (\",\" root)*)? \"]\" | \"\"",
        "root ::= <[97]> !<[98]> <tool_call> !</tool_call>",
        "root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= ident | num | \"(\" ws expr \")\" ws\nident ::= [a-z] "
        "[a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*",
        "root ::= \"a\"{2000} \"b\"{0,2000} (\"c\" \"d\"){7,1999}",
        "root ::= (\"a\"{0} | \"\"{0}) \"\" []",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        chat_gbnf_cost cost;
        const char *fault = chat_gbnf_fault(texts[i], true, &cost);
        if (i + 1 == sizeof texts / sizeof texts[0]) { /* nothing can be repeated */
            assert_string_equal(fault, "isn't GBNF with a rule `root`");
            continue;
        }
        if (fault) fail_msg("%s: %s", texts[i], fault);
        assert_true(cost.ways > 0 && cost.ways < 100 && cost.visits > 0 && cost.visits < 100);
        chat_plan p = plan_of(false, NULL);
        p.r.lazy = false;
        p.r.grammar = (char *)(uintptr_t)texts[i];
        chat_grammar *g;
        oai_error e = {0};
        if (chat_grammar_new(&p, &g, &e) != 0) fail_msg("%s: %s", texts[i], e.message);
        chat_grammar_free(g);
    }
    /* what llama.cpp wouldn't read isn't read here either */
    static const char *const bad[] = {
        "", "root", "root ::= (", "root ::= \"", "root ::= [", "root ::= [a", "root ::= [a-", "root ::= \"\\",
        "root ::= \"\\q\"",
        "root ::= \"\\x4\"", "root ::= undefined", "x ::= \"a\"", "root ::= *", "root ::= \"a\"{",
        "root ::= \"a\"{,3}",
        "root ::= \"a\"{1", "root ::= \"a\"{1,2", "root ::= \"a\" )", "root ::= <", "root ::= !", "root ::= \"a\" ;",
        "root = \"a\"", "::= \"a\"", "root ::= (\"a\"\nx ::= \"b\"", "root ::= \"a\" root2 ::= \"b\""};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) refuse_grammar(strdup(bad[i]), "isn't GBNF");
    /* a number that llama.cpp takes for endless: wrong where it is a client's own */
    assert_null(chat_gbnf_fault("root ::= \"a\"{0,5000}", false, NULL));
    assert_non_null(chat_gbnf_fault("root ::= \"a\"{0,5000}", true, NULL));
    assert_non_null(chat_gbnf_fault("root ::= \"a\"{5000}", false, NULL));
}

#if IMPRESS_HAVE_LLAMA_COMMON
/* Large schemas, as they are in use: optional properties, deep arrays, unions, enumerations, long texts. */
static void test_schemas_cost_little(void **unused)
{
    (void)unused;
    static const struct {
        const char *head, *part, *tail;
        int n;
    } schemas[] = {
        {"{\"type\":\"object\",\"properties\":{", "\"p%d\":{\"type\":\"string\"},", "\"z\":{}}}", 300},
        {"{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{",
         "\"p%d\":{\"type\":\"array\",\"items\":{\"type\":\"array\",\"items\":{\"type\":[\"number\",\"null\"]}}},",
         "\"z\":{}}}", 60},
        {"{\"anyOf\":[",
         "{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"k%d\"},\"x\":{},\"y\":{}},"
         "\"required\":[\"kind\"]},",
         "{}]}", 100},
        {"{\"enum\":[", "\"value-%d\",", "null]}", 1500},
        {"{\"type\":\"object\",\"properties\":{", "\"p%d\":{\"type\":\"string\",\"maxLength\":2000},",
         "\"z\":{}}}", 100},
        {"{\"type\":\"array\",\"minItems\":2,\"maxItems\":200,\"items\":{\"enum\":[", "%d,", "0]}}", 50},
        {"{\"type\":\"string\",\"maxLength\":", "%d", "5000}", 1},
    };
    for (size_t i = 0; i < sizeof schemas / sizeof schemas[0]; i++) {
        size_t room = 4096 + (size_t)schemas[i].n * 200, at = 0;
        char *text = malloc(room);
        assert_non_null(text);
        at += (size_t)snprintf(text, room, "%s", schemas[i].head);
        for (int k = 1; k <= schemas[i].n; k++) {
            const char *d = strchr(schemas[i].part, '%');
            int n_head = (int)(d - schemas[i].part);
            at += (size_t)snprintf(text + at, room - at, "%.*s%d%s", n_head, schemas[i].part, k, d + 2);
        }
        snprintf(text + at, room - at, "%s", schemas[i].tail);
        oai_error e = {0};
        char *grammar = chat_way_common.grammar_of(text, &e);
        if (!grammar) fail_msg("%s", e.message);
        chat_gbnf_cost cost;
        const char *fault = chat_gbnf_fault(grammar, false, &cost);
        if (fault) fail_msg("%.200s: %s", text, fault);
        assert_true(cost.ways < 2500 && cost.visits < 2500 && cost.work < 5000000 && cost.bytes < 64 << 20);
        free(grammar);
        free(text);
    }
    oai_error e = {0};
    char *grammar = chat_way_common.grammar_of("{\"type\":\"string\",\"minLength\":5,\"maxLength\":3}", &e);
    assert_non_null(grammar);
    refuse_grammar(grammar, "fewer times");
}
#endif

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
        cmocka_unit_test(test_endless_grammars),
        cmocka_unit_test(test_ordinary_grammars),
        cmocka_unit_test(test_mutes_overlap),
#if IMPRESS_HAVE_LLAMA_COMMON
        cmocka_unit_test(test_more_than_the_trigger),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_long_answers),
        cmocka_unit_test(test_schemas_cost_little),
#endif
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
