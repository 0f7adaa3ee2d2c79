/* fuzz_gbnf.c: any text as a grammar. What is taken is whole, and within the bounds. */
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "serve/chat_gbnf.h"

static void check(const gbnf *g)
{
    MUST(g->n_rules > 0 && g->n_elements > 0 && g->root < g->n_rules && g->first[0] == 0);
    MUST(g->elements[g->n_elements - 1].kind == GBNF_END);
    for (size_t i = 0; i < g->n_rules; i++) {
        MUST(g->first[i] < g->first[i + 1]);
        for (uint32_t k = g->first[i]; k < g->first[i + 1]; k++) MUST(g->starts[k] < g->n_elements);
    }
    for (size_t i = 0; i < g->n_elements; i++) {
        const gbnf_element e = g->elements[i];
        MUST(e.kind <= GBNF_NO_TOKEN && (e.kind != GBNF_RULE || e.value < g->n_rules));
        if (e.kind != GBNF_CLASS) continue;
        const gbnf_class *c = &g->classes[e.value];
        MUST(c->n > 0);
        for (uint32_t k = 0; k < c->n; k++) {
            const gbnf_range r = g->ranges[c->first + k];
            if (r.low < 128 && r.low <= r.high) MUST((c->ascii[r.low / 64] >> r.low % 64 & 1) != c->negated);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    char *text = malloc(n_bytes + 1);
    MUST(text);
    memcpy(text, bytes, n_bytes);
    text[n_bytes] = '\0';
    for (int exact = 0; exact < 2; exact++) {
        gbnf *g;
        chat_gbnf_cost cost;
        const char *fault = chat_gbnf_read(text, exact, NULL, &g, &cost);
        MUST((fault == NULL) == (g != NULL));
        MUST(fault || (cost.ways > 0 && cost.ways <= 10000 && cost.visits > 0 && cost.visits <= 10000));
        if (g) check(g);
        chat_gbnf_free(g);
    }
    free(text);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const char *const texts[] = {
        "root ::= object\nvalue ::= object | \"[\" ws (value (\",\" ws value)*)? \"]\" | [0-9]+ | \"null\"\n"
        "object ::= \"{\" ws (\"\\\"\" [^\"\\\\\\x7F\\x00-\\x1F]* \"\\\":\" ws value)? \"}\"\nws ::= [ \\t\\n]{0,20}\n",
        "root ::= (\"a\"? (b | \"c\"*))+ # more\r\nb ::= ( x\n| y ) \"\\u00e9\\U0001F600\"\n"
        "x::=y{2}y{1,}\ny::=[^\\]a-c-].",
        "root ::= <[12]> !<[7]> <tool> !</tool>{1,3}",
        "r1 ::= r2 r2 | \"\"\nr2 ::= r3 r3 | \"\"\nr3 ::= r4 r4 | \"\"\nr4 ::= \"a\" | \"\"\nroot ::= \"[\" r1",
        "root ::= \"[\" a\na ::= b a \"x\" | \"y\"\nb ::= c c\nc ::= \"\" | \"z\"",
        "root ::= ((((\"a\"?){0,99}){0,99}){0,99}){5,3}",
    };
    if (i >= sizeof texts / sizeof texts[0]) return 0;
    size_t n = strlen(texts[i]);
    MUST(n <= room);
    memcpy(out, texts[i], n);
    return n;
}
