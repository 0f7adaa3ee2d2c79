/* Texts against grammars: as llama.cpp has it, where that comes to an end; and where it doesn't. */
#include "chat_fixture.h"

#include <math.h>

#include "base/rng.h"
#include "serve/chat_match.h"
#include "serve/chat_mute.h"

enum { N = N_BYTES + N_SPECIAL };

static struct llama_model *m;
static const struct llama_vocab *vocab;
static match_words *w;
static imp_rng rng;

static size_t below(size_t n)
{
    return (size_t)imp_rng_below(&rng, n);
}

static gbnf *read_grammar(const char *text)
{
    gbnf *g;
    const char *fault = chat_gbnf_read(text, true, vocab, &g, NULL);
    if (fault) fail_msg("%s: %s", text, fault);
    return g;
}

/* Which tokens may come, by one question for all, and by one for each: they must agree. */
static void ask(matcher *x, bool allowed[N])
{
    llama_token_data data[N];
    for (llama_token k = 0; k < N; k++) data[k] = (llama_token_data){.id = N - 1 - k}; /* in any order */
    matcher_apply(x, &(llama_token_data_array){.data = data, .size = N, .selected = -1});
    for (llama_token k = 0; k < N; k++) {
        allowed[k] = data[N - 1 - k].logit == 0;
        assert_int_equal(allowed[k], matcher_allows(x, k));
    }
}

static void put(char *text, size_t room, const char *part)
{
    size_t n = strlen(text);
    snprintf(text + n, room - n, "%s", part);
}

static void put_symbols(char *text, size_t room, int depth)
{
    static const char *const symbols[] = {
        "\"a\"", "\"b\"", "\"ab\"", "[ab]", "[^a]", "\"\xc3\xa9\"", "[\xc3\xa0-\xc3\xbc\\u20ac]", ".", "a", "b", "c",
        "<[256]>", "!<[97]>", "\"\\U0001F600\"", "\"\""};
    static const char *const counts[] = {"?", "*", "+", "{2}", "{0,2}", "{1,}"};
    for (size_t i = below(4); i > 0; i--) {
        if (depth > 0 && below(4) == 0) {
            put(text, room, " (");
            put_symbols(text, room, depth - 1);
            put(text, room, " | ");
            put_symbols(text, room, depth - 1);
            put(text, room, " )");
        } else {
            const char *symbol = symbols[below(sizeof symbols / sizeof symbols[0])];
            put(text, room, " ");
            put(text, room, symbol);
            if (!strcmp(symbol, "\"\"")) continue; /* can't be repeated */
        }
        if (below(3) == 0) put(text, room, counts[below(6)]);
    }
}

static void make_grammar(char *text, size_t room)
{
    static const char *const names[] = {"root ::= ", "a ::= \"a\"", "b ::= [ab]", "c ::= "};
    text[0] = '\0';
    for (int r = 0; r < 4; r++) {
        put(text, room, names[r]);
        put_symbols(text, room, 2);
        for (size_t i = below(3); i > 0; i--) {
            put(text, room, " | ");
            put_symbols(text, room, 1);
        }
        put(text, room, "\n");
    }
}

static bool accept_by_llama(struct llama_sampler *s, llama_token token)
{
#if IMPRESS_HAVE_LLAMA_COMMON
    return chat_way_common.accept(s, token);
#else
    return chat_way_plain.accept(s, token);
#endif
}

static void walk_beside_llama(const char *text)
{
    gbnf *g = read_grammar(text);
    matcher *x = matcher_new(g, w);
    chat_mute();
    struct llama_sampler *s = llama_sampler_init_grammar(vocab, text, "root");
    chat_unmute();
    assert_true(x && s);
    bool allowed[N], by_tokens = strchr(text, '<') != NULL;
    llama_token_data data[N];
    for (int step = 0; step < 8; step++) {
        ask(x, allowed);
        llama_token_data_array all = {.data = data, .size = N, .selected = -1};
        for (llama_token k = 0; k < N; k++) data[k] = (llama_token_data){.id = k};
        llama_sampler_apply(s, &all);
        llama_token may[N];
        size_t n_may = 0;
        for (llama_token k = 0; k < N; k++) {
            /* For llama.cpp parts of characters are no tokens, and what is left of a token's text is one. */
            if (by_tokens && k >= 128) continue;
            if (allowed[k] != (data[k].logit == 0)) fail_msg("%s\nstep %d, token %d: %d", text, step, k, allowed[k]);
            if (allowed[k] && k != END) may[n_may++] = k;
        }
        if (n_may == 0) break;
        llama_token token = may[below(n_may)];
        if (below(2) && allowed['a']) token = 'a';
        assert_true(matcher_accept(x, token));
        assert_true(accept_by_llama(s, token));
    }
    llama_sampler_free(s);
    matcher_free(x);
    chat_gbnf_free(g);
}

static void test_beside_llama(void **unused)
{
    (void)unused;
    static const char *const texts[] = {
        chat_json_grammar,
        "root ::= (\"a\"? (\"b\"? | \"c\"*))* \"d\"",
        "root ::= ([ab]*)*",
        "root ::= \"a\" root \"b\" | \"a\" root \"a\" | \"a\"",
        "root ::= e e \"x\"\ne ::= \"\" | e2\ne2 ::= \"a\"?",
        "root ::= \"a\" root b | \"b\"\nb ::= \"c\" | \"\"",
        "root ::= !<[97]> [a-z]* !<[98]> | <[99]> \"b\"",
        "root ::= [\\u00e0-\\u00ff]+ [^\\u20ac] \"\\U0001F600\"? .",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        for (int k = 0; k < 10; k++) walk_beside_llama(texts[i]);
    }
    size_t n = 0;
    for (int i = 0; i < 1500; i++) {
        char text[4096];
        chat_gbnf_cost cost;
        make_grammar(text, sizeof text);
        if (chat_gbnf_fault(text, true, &cost) || cost.ways > 8) continue; /* beyond it is llama.cpp that takes long */
        walk_beside_llama(text);
        n++;
    }
    assert_true(n > 100);
}

/* Take in bytes, up to the first that may not come: how many. */
static size_t take(matcher *x, const char *text)
{
    size_t n = 0;
    while (text[n] && matcher_accept(x, (llama_token)(unsigned char)text[n])) n++;
    return n;
}

static char *times(const char *part, int n)
{
    size_t bytes = strlen(part);
    char *out = calloc(bytes, (size_t)n + 1);
    assert_non_null(out);
    for (int i = 0; i < n; i++) memcpy(out + (size_t)i * bytes, part, bytes);
    return out;
}

/* Each of these has llama.cpp's stacks double with each character, or so. */
static void test_ambiguous_grammars(void **unused)
{
    (void)unused;
    char *optional = times(" \"a\"?", 400), *stars = times(" [^z]*", 30), grammar[8192];
    static const struct {
        const char *grammar, *part, *tail;
        int n;
        const char *wrong;
    } cases[] = {
        {"root ::= \"a\" root \"x\" | \"a\" root \"y\" | \"a\"", "a", "xyxxy", 300, "z"},
        {"root ::= \"[\" s\ns ::= [^e] s \"x\" | [^e] s \"y\" | [^e]", "[", "abcd", 300, "e"},
        {"root ::= e\ne ::= \"{l:\" e \",a:\" e \"}\" | \"{l:\" e \",b:\" e \"}\" | [0-9]+", "{l:", "1,b:2},a:3}", 200,
         "x"},
        {"root ::= s\ns ::= \"a\" s t | \"a\" t s | \"a\" | \"b\"\nt ::= \"a\" | \"\"", "a", "baa", 200, "b"},
        {"root ::= (\"a\"? (\"b\"? \"a\"?)*)* \"d\"", "aab", "", 300, "c"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0] + 2; i++) {
        size_t k = i < sizeof cases / sizeof cases[0] ? i : 0;
        const char *part = cases[k].part, *tail = cases[k].tail, *wrong = cases[k].wrong;
        int n = cases[k].n;
        if (i != k) {
            bool star = i == sizeof cases / sizeof cases[0];
            snprintf(grammar, sizeof grammar, "root ::= %s \"z\"", star ? stars : optional);
            part = "a", tail = "z", wrong = "z";
        }
        gbnf *g = read_grammar(i == k ? cases[i].grammar : grammar);
        matcher *x = matcher_new(g, w);
        assert_non_null(x);
        char *text = times(part, n);
        bool allowed[N];
        assert_int_equal(take(x, text), strlen(text));
        ask(x, allowed);
        assert_int_equal(take(x, tail), strlen(tail));
        ask(x, allowed);
        assert_false(allowed[(unsigned char)wrong[0]]);
        assert_false(matcher_accept(x, (unsigned char)wrong[0]));
        free(text);
        matcher_free(x);
        chat_gbnf_free(g);
    }
    free(stars);
    free(optional);
}

/* So many may come, and no more. */
static void test_counts(void **unused)
{
    (void)unused;
    static const struct {
        const char *grammar;
        size_t least, most;
    } cases[] = {{"root ::= \"a\"{3,70}", 3, 70}, {"root ::= (\"a\"? \"a\"?){20} \"a\"{2}", 2, 42},
                 {"root ::= \"a\"{0}", 0, 0},     {"root ::= (\"aa\" | \"a\"){10}", 10, 20},
                 {"root ::= x{5}\nx ::= \"a\" | y y\ny ::= \"\" | \"a\"", 0, 10}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        gbnf *g = read_grammar(cases[i].grammar);
        matcher *x = matcher_new(g, w);
        assert_non_null(x);
        for (size_t n = 0; n <= cases[i].most; n++) {
            assert_int_equal(matcher_allows(x, END), n >= cases[i].least);
            assert_int_equal(matcher_accept(x, 'a'), n < cases[i].most);
        }
        matcher_free(x);
        chat_gbnf_free(g);
    }
}

/* What can't be reached any more is left out, and what is kept stays as it is. */
static void test_long_texts(void **unused)
{
    (void)unused;
    gbnf *g = read_grammar("root ::= \"(\" (\"[\" w \"]\" | root \";\")* \")\"\nw ::= x x\nx ::= [a-z]+ | \"\"");
    matcher *x = matcher_new(g, w);
    assert_non_null(x);
    for (int depth = 0; depth < 50; depth++) {
        assert_int_equal(take(x, "("), 1);
        for (int i = 0; i < 1000; i++) assert_int_equal(take(x, "[][ab][c]"), 9);
    }
    for (int depth = 50; depth > 0; depth--) {
        assert_false(matcher_allows(x, END));
        assert_int_equal(take(x, depth > 1 ? ");[x](" : ")"), depth > 1 ? 6 : 1);
        if (depth > 1) assert_int_equal(take(x, ");"), 2);
    }
    assert_true(matcher_allows(x, END));
    assert_int_equal(take(x, ")"), 0);
    assert_true(matcher_accept(x, END));
    matcher_free(x);
    chat_gbnf_free(g);
}

/* What repeats itself inside of what repeats itself could have begun again at any character. */
static void test_stars_in_stars(void **unused)
{
    (void)unused;
    gbnf *g = read_grammar("root ::= ([a-z]* [a-y]* [a-x]* [a-w]* [a-v]* [a-u]* [a-t]* [a-s]* [a-r]* [a-q]*)* \"Z\" b\n"
                           "b ::= (c c c | c c) \"Y\"\nc ::= \"(\" c \")\" c | [^()Y] c | \"\"");
    matcher *x = matcher_new(g, w);
    assert_non_null(x);
    bool allowed[N];
    for (int i = 0; i < 2000; i++) {
        assert_int_equal(take(x, "a"), 1);
        if (i % 20 == 0) ask(x, allowed);
    }
    assert_int_equal(take(x, "Z"), 1);
    for (int i = 0; i < 1000; i++) assert_int_equal(take(x, i % 10 < 5 ? "(" : ")"), 1);
    ask(x, allowed);
    assert_true(allowed['('] && allowed['Y'] && allowed['a'] && !allowed[')'] && !allowed[END]);
    for (int i = 0; i < 1000; i++) assert_int_equal(take(x, "("), 1);
    ask(x, allowed);
    assert_true(allowed['('] && allowed[')'] && !allowed['Y']);
    for (int i = 0; i < 1000; i++) assert_int_equal(take(x, ")"), 1);
    assert_int_equal(take(x, ")"), 0);
    assert_int_equal(take(x, "Y"), 1);
    assert_true(matcher_allows(x, END) && !matcher_failed(x));
    matcher_free(x);
    chat_gbnf_free(g);
}

/* Of ever more ways to read a text, all of which can become different ones. It ends, and says so. */
static void test_too_much_work(void **unused)
{
    (void)unused;
    char text[4096] = "root ::= s\ns ::= [^Z]", rule[64];
    for (int i = 0; i < 20; i++) {
        snprintf(rule, sizeof rule, " | [^Z] s t%d", i);
        put(text, sizeof text, rule);
    }
    for (int i = 0; i < 20; i++) {
        snprintf(rule, sizeof rule, "\nt%d ::= [^Z] | \"\"", i);
        put(text, sizeof text, rule);
    }
    gbnf *g = read_grammar(text);
    matcher *x = matcher_new(g, w);
    assert_non_null(x);
    llama_token_data data[N];
    llama_token_data_array all = {.data = data, .size = N, .selected = -1};
    size_t n = 0;
    while (!matcher_failed(x)) {
        for (llama_token k = 0; k < N; k++) data[k] = (llama_token_data){.id = k};
        matcher_apply(x, &all);
        if (!matcher_failed(x)) assert_true(data['a'].logit == 0 && data['Z'].logit < 0);
        n += matcher_accept(x, 'a');
        assert_true(n < 100000);
    }
    assert_true(n > 10);
    for (llama_token k = 0; k < N; k++) data[k] = (llama_token_data){.id = k};
    matcher_apply(x, &all);
    for (llama_token k = 0; k < N; k++)
        assert_true(data[k].logit < 0 && !matcher_allows(x, k) && !matcher_accept(x, k));
    matcher_free(x);
    chat_gbnf_free(g);
}

/* Tokens by their number or text, beside characters; also such whose text begins in the middle of one. */
static void test_tokens(void **unused)
{
    (void)unused;
    static const struct {
        const char *grammar;
        llama_token tokens[8];
        int n; /* that are taken */
        bool end;
    } cases[] = {
        {"root ::= <tool_call> [a-z]* </tool_call>", {CALL, 'x', 'y', CALL_END}, 4, true},
        {"root ::= <tool_call> [a-z]* </tool_call>", {CALL, 'x', '<'}, 2, false},
        {"root ::= <tool_call> [a-z]* </tool_call>", {'<'}, 0, false},
        {"root ::= (<[256]> | [<|a-z_]+) \">\"*", {START, '>'}, 2, true},
        {"root ::= (<[256]> | [<|a-z_]+) \">\"*", {'<', '|', '>'}, 3, true},
        {"root ::= . <[256]> \"a\"", {START}, 0, false},
        {"root ::= . <[256]> \"a\"", {'x', START, 'a'}, 3, true},
        {"root ::= !<[97]>* \"a\"", {'b', CALL, 0xc3, 'b', 'a', 'b'}, 5, true},
        {"root ::= \"\xc3\xa9\" !<[97]>", {0xc3, 0xa9, 'b'}, 3, true},
        {"root ::= \"\xc3\xa9\" !<[97]>", {0xc3, 'b'}, 1, false},
        {"root ::= [^\xc3\xa9]", {0xe2, 0x82, 0xac}, 3, true},
        {"root ::= [^\xc3\xa9]", {0xc3}, 0, false}, /* as some of what could come is left out */
        {"root ::= .", {0xa9}, 0, false},
        {"root ::= .", {0xc0}, 0, false},
        {"root ::= .", {BOS}, 0, false},
        {"root ::= \"<s>\" END | \"<s\"\nEND ::= \"\"", {BOS}, 1, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        gbnf *g = read_grammar(cases[i].grammar);
        matcher *x = matcher_new(g, w);
        assert_non_null(x);
        bool allowed[N];
        for (int k = 0; k <= cases[i].n && (k < cases[i].n || cases[i].tokens[k]); k++) {
            ask(x, allowed);
            if (allowed[cases[i].tokens[k]] != (k < cases[i].n)) fail_msg("%s: %d", cases[i].grammar, k);
            assert_int_equal(matcher_accept(x, cases[i].tokens[k]), k < cases[i].n);
        }
        assert_int_equal(matcher_allows(x, END), cases[i].end);
        assert_int_equal(matcher_accept(x, END), cases[i].end);
        matcher_free(x);
        chat_gbnf_free(g);
    }
}

/* The end of a token, as a trigger within one has it; tokens that there are not. */
static void test_parts_of_tokens(void **unused)
{
    (void)unused;
    gbnf *g = read_grammar("root ::= \"call>\" [0-9]");
    matcher *x = matcher_new(g, w);
    assert_non_null(x);
    assert_false(matcher_accept(x, CALL));
    assert_false(matcher_accept_end(x, CALL, 5));
    assert_false(matcher_accept_end(x, CALL, strlen("<tool_call>")));
    assert_false(matcher_allows(x, -1) || matcher_allows(x, N) || matcher_accept(x, N));
    llama_token_data data[] = {{.id = N}, {.id = -1}, {.id = 'c'}};
    matcher_apply(x, &(llama_token_data_array){.data = data, .size = 3, .selected = -1});
    assert_true(data[0].logit == -INFINITY && data[1].logit == -INFINITY && data[2].logit == 0);
    assert_true(matcher_accept_end(x, CALL, strlen("<tool_")));
    assert_true(matcher_allows(x, '7') && !matcher_allows(x, 'x') && !matcher_allows(x, END));
    assert_true(matcher_accept(x, '7') && matcher_allows(x, END));
    matcher_free(x);
    chat_gbnf_free(g);
}

static int setup(void **unused)
{
    (void)unused;
    m = make_model(NULL, false);
    vocab = llama_model_get_vocab(m);
    w = match_words_new(vocab);
    imp_rng_seed(&rng, imp_test_seed());
    return w ? 0 : -1;
}

static int teardown(void **unused)
{
    (void)unused;
    match_words_free(w);
    llama_model_free(m);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beside_llama), cmocka_unit_test(test_ambiguous_grammars),
        cmocka_unit_test(test_counts),       cmocka_unit_test(test_long_texts),
        cmocka_unit_test(test_stars_in_stars), cmocka_unit_test(test_too_much_work),
        cmocka_unit_test(test_tokens),       cmocka_unit_test(test_parts_of_tokens),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
