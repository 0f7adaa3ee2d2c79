/* chat_gbnf.h: a GBNF text as rules, read as llama.cpp reads it, and what it would cost. For chat_grammar.c,
 * chat_match.c and tests.
 *
 * llama.cpp expands repetitions in memory, looks for left recursion by a recursion of its own, which walks through a
 * rule again each time it comes to it, and keeps a stack for each way in which a text may go on. Each of these can be
 * made to take for ever, or all memory, by a text of a few hundred bytes. */
#ifndef CHAT_GBNF_H
#define CHAT_GBNF_H

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum gbnf_kind {
    GBNF_END,      /* of a rule's last alternative */
    GBNF_ALT,      /* of another one */
    GBNF_RULE,     /* value: its number */
    GBNF_CHAR,     /* the character */
    GBNF_CLASS,    /* the class */
    GBNF_ANY,      /* any character */
    GBNF_TOKEN,    /* the token */
    GBNF_NO_TOKEN, /* any other */
} gbnf_kind;

typedef struct gbnf_element {
    uint32_t kind, value;
} gbnf_element;

/* Of an alternative, the last one or another. */
static inline bool gbnf_is_end(gbnf_element e) { return e.kind == GBNF_END || e.kind == GBNF_ALT; }

typedef struct gbnf_range {
    uint32_t low, high;
} gbnf_range;

typedef struct gbnf_class {
    uint32_t first, n; /* its ranges */
    bool negated;
    uint64_t ascii[2]; /* bits of the characters below 128 that are in it, or aren't where it is negated */
} gbnf_class;

typedef struct gbnf {
    gbnf_element *elements;  /* [n_elements] of all rules, in which each alternative ends with one of the ends */
    size_t n_elements, n_rules;
    uint32_t *first, *starts; /* rule i: its alternatives begin at elements starts[first[i]..first[i + 1]) */
    gbnf_class *classes;
    gbnf_range *ranges;
    uint32_t root;
} gbnf;

/* What a grammar comes to. Numbers stay at SIZE_MAX / 4 where they would be more. */
typedef struct chat_gbnf_cost {
    size_t ways;   /* in which a text may go on, from the worst place within one rule: a stack each */
    size_t visits; /* of rules by the worst of the searches for left recursion: also how deep it may get */
    size_t work;   /* elements looked at by all of them */
    size_t bytes;  /* of memory for the rules */
} chat_gbnf_cost;

/* NULL and *out, or what is wrong with a text, to be said behind "the grammar". Time and memory go with its length and
 * with what is allowed. *cost (NULL is allowed) is what is known: all of it where nothing is wrong, or the cost is.
 * `exact`: numbers of repetitions that llama.cpp takes for endless are wrong. `vocab` NULL: what a token's text means
 * isn't asked; out NULL: only the fault is. */
const char *chat_gbnf_read(const char *text, bool exact, const struct llama_vocab *vocab, gbnf **out,
                           chat_gbnf_cost *cost);
const char *chat_gbnf_fault(const char *text, bool exact, chat_gbnf_cost *cost);
void chat_gbnf_free(gbnf *g); /* NULL is allowed */

#endif
