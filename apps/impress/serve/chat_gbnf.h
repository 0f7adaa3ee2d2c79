/* chat_gbnf.h: what a GBNF text would cost llama.cpp, found out before it reads it.
 *
 * llama.cpp expands repetitions in memory, looks for left recursion by a recursion of its own, which walks through a
 * rule again each time it comes to it, and keeps a stack for each way in which a text may go on. Each of these can be
 * made to take for ever, or all memory, by a text of a few hundred bytes. */
#ifndef CHAT_GBNF_H
#define CHAT_GBNF_H

#include <stdbool.h>
#include <stddef.h>

/* What a grammar comes to. Numbers stay at SIZE_MAX / 4 where they would be more. */
typedef struct chat_gbnf_cost {
    size_t ways;   /* in which a text may go on, from the worst place within one rule: a stack each */
    size_t visits; /* of rules by the worst of the searches for left recursion: also how deep it may get */
    size_t work;   /* elements looked at by all of them */
    size_t bytes;  /* of memory for the rules */
} chat_gbnf_cost;

/* NULL, or what is wrong with a text, to be said behind "the grammar". Time and memory go with its length and with what
 * is allowed. *cost (NULL is allowed) is what is known: all of it where nothing is wrong, or the cost is. `exact`:
 * numbers of repetitions that llama.cpp takes for endless are wrong. */
const char *chat_gbnf_fault(const char *text, bool exact, chat_gbnf_cost *cost);

#endif
