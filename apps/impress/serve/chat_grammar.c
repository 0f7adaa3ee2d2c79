/* chat_grammar.c: the grammar of an answer, by chat_match.c, and when it begins.
 *
 * A lazy grammar, that of tool calls the model may make or not, lies idle until a trigger comes in the answer: words
 * are looked for in the end of the text, and the matcher gets to see the tokens from there on. Inside reasoning nothing
 * is looked for: a model may think about calling a tool.
 *
 * Some templates have patterns for triggers, std::regex's: then it is llama.cpp's own sampler that waits, and keeps the
 * grammar. It throws, or aborts, when it takes in a token that doesn't fit, so each is asked for first. It searches all
 * of the answer again for each token, which takes stack for each byte: after a while it is let go. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "chat_match.h"
#include "chat_mute.h"
#include "chat_ways.h"
#include "tokenize.h"

enum {
    MAX_PIECE_BYTES = 512,
    MAX_PATTERN_TEXT = 16 << 10, /* a pattern that hasn't matched so far won't */
};

typedef struct held_token {
    llama_token token;
    size_t n; /* bytes of its text */
} held_token;

struct chat_grammar {
    const chat_plan *p;
    gbnf *grammar;
    match_words *own_words; /* NULL: the plan has some */
    matcher *matcher;
    struct llama_sampler *sampler; /* instead of these, with patterns */
    bool waiting;   /* for a word. With patterns the sampler itself waits, and may be asked meanwhile */
    bool off;       /* nothing is constrained any more */
    bool thinking;  /* of a lazy one */
    bool answering; /* the prompt's end has been taken in */
    /* While waiting: the end of the answer, and the tokens it came from; tail[0..from) has been looked at. */
    char *tail;
    held_token *held;
    size_t n_tail, tail_room, n_held, held_room, from;
    size_t n_begun;        /* bytes of what the answer must begin with that are there; only with `begin` */
    size_t longest;        /* bytes of the longest text that is looked for */
    size_t n_pattern;      /* bytes that patterns have seen */
    bool by_pattern_awake; /* one of them came */
};

/* ---- made ---- */

/* A word as a regular expression. */
static char *escaped(const char *word)
{
    char *out = malloc(2 * strlen(word) + 1), *to = out;
    if (!out) return NULL;
    for (; *word; word++) {
        if (strchr(".^$|()*+?[]{}\\", *word)) *to++ = '\\';
        *to++ = *word;
    }
    *to = '\0';
    return out;
}

/* Taken for one that waits for words as well, as the template wants both. NULL: it can't be made. */
static struct llama_sampler *pattern_sampler(const chat_plan *p)
{
    const chat_rendering *r = &p->r;
    size_t n = r->words.n + r->patterns.n, n_escaped = 0;
    struct llama_sampler *s = NULL;
    const char **patterns = calloc(n + 1, sizeof *patterns);
    char **words = calloc(r->words.n + 1, sizeof *words);
    if (!patterns || !words) goto out;
    for (; n_escaped < r->words.n; n_escaped++) {
        words[n_escaped] = escaped(r->words.items[n_escaped]);
        if (!words[n_escaped]) goto out;
        patterns[n_escaped] = words[n_escaped];
    }
    for (size_t i = 0; i < r->patterns.n; i++) patterns[r->words.n + i] = r->patterns.items[i];
    chat_mute(); /* llama.cpp prints a grammar that is none */
    s = llama_sampler_init_grammar_lazy_patterns(p->vocab, r->grammar, "root", patterns, n, NULL, 0);
    chat_unmute();
out:
    for (size_t i = 0; i < n_escaped; i++) free(words[i]);
    free(words);
    free(patterns);
    return s;
}

/* Take in the end of the prompt that the grammar counts as the beginning of the answer. */
static bool accept_prefill(chat_grammar *g)
{
    const char *text = g->p->r.prefill;
    llama_token *tokens = NULL;
    size_t n = 0;
    bool ok = app_tokenize_more(g->p->vocab, text, strlen(text), false, true, &tokens, &n);
    for (size_t i = 0; ok && i < n; i++) {
        char piece[MAX_PIECE_BYTES];
        int32_t bytes = llama_token_to_piece(g->p->vocab, tokens[i], piece, sizeof piece, 0, true);
        /* Some tokenisers put a blank in front of the first. */
        if (i == 0 && bytes > 0 && piece[0] == ' ' && text[0] != ' ') continue;
        ok = chat_grammar_accept(g, tokens[i]);
    }
    free(tokens);
    return ok;
}

/* Whether the prompt's end begins a reasoning that the answer goes on with. */
static bool prompt_thinks(const chat_rendering *r)
{
    const char *at = NULL;
    for (const char *s = r->prefill; s && (s = strstr(s, r->think_start)); s++) at = s;
    if (!at) return false;
    for (size_t i = 0; i < r->think_ends.n; i++) {
        if (strstr(at, r->think_ends.items[i])) return false;
    }
    return true;
}

static size_t longest_of(const chat_texts *t, size_t longest)
{
    for (size_t i = 0; i < t->n; i++) {
        size_t n = strlen(t->items[i]);
        if (n > longest) longest = n;
    }
    return longest;
}

int chat_grammar_new(const chat_plan *p, chat_grammar **out, oai_error *e)
{
    *out = NULL;
    const chat_rendering *r = &p->r;
    if (!r->grammar) return 0;
    gbnf *grammar;
    const char *fault = chat_gbnf_read(r->grammar, p->own_grammar, p->vocab, &grammar, NULL);
    if (fault)
        return oai_fail(e, 400, "invalid_grammar", p->own_grammar ? "grammar" : NULL,
                        p->own_grammar ? "the grammar %s" : "the grammar that tools or schema give %s", fault);
    chat_grammar *g = calloc(1, sizeof *g);
    if (!g) {
        chat_gbnf_free(grammar);
        return oai_fail(e, 500, NULL, NULL, "the server is out of memory");
    }
    g->p = p;
    g->grammar = grammar;
    g->waiting = r->lazy && r->patterns.n == 0;
    if (r->lazy && r->patterns.n > 0) {
        g->sampler = pattern_sampler(p);
    } else {
        if (!p->words) g->own_words = match_words_new(p->vocab);
        if (p->words || g->own_words) g->matcher = matcher_new(grammar, p->words ? p->words : g->own_words);
    }
    if (!g->sampler && !g->matcher) {
        if (g->waiting || !r->lazy) oai_fail(e, 500, NULL, NULL, "the server is out of memory");
        else oai_fail(e, 400, "invalid_grammar", NULL, "tools are too large for a grammar");
        goto fail;
    }
    if (r->think_start && r->lazy) {
        g->thinking = prompt_thinks(r);
        g->longest = longest_of(&r->think_ends, strlen(r->think_start));
    }
    g->longest = longest_of(&r->words, g->longest);
    if (!r->lazy && r->prefill && !p->own_grammar && !accept_prefill(g)) {
        /* Of some models' templates, where a tool's result comes last. To ask again wouldn't help. */
        oai_fail(e, 400, "template_error", NULL, "the chat template's prompt and its grammar don't fit together");
        goto fail;
    }
    g->answering = true;
    *out = g;
    return 0;
fail:
    chat_grammar_free(g);
    return -1;
}

void chat_grammar_free(chat_grammar *g)
{
    if (!g) return;
    if (g->sampler) llama_sampler_free(g->sampler);
    matcher_free(g->matcher);
    chat_gbnf_free(g->grammar);
    match_words_free(g->own_words);
    free(g->tail);
    free(g->held);
    free(g);
}

/* ---- used ---- */

static bool idle(const chat_grammar *g)
{
    return g->off || g->waiting || g->thinking;
}

/* Whether a token goes on with what the answer must begin with, if it isn't all there yet. */
static bool begins(const chat_grammar *g, llama_token token)
{
    const char *rest = g->p->r.begin ? g->p->r.begin + g->n_begun : "";
    size_t n = strlen(rest);
    if (n == 0 || !g->answering) return true;
    char piece[MAX_PIECE_BYTES];
    int32_t got = llama_token_to_piece(g->p->vocab, token, piece, sizeof piece, 0, true);
    return got > 0 && memcmp(piece, rest, n < (size_t)got ? n : (size_t)got) == 0;
}

bool chat_grammar_allows(chat_grammar *g, llama_token token)
{
    if (idle(g)) return true;
    if (!begins(g, token)) return false;
    if (g->matcher) return matcher_allows(g->matcher, token);
    llama_token_data one = {.id = token};
    llama_token_data_array all = {.data = &one, .size = 1, .selected = -1};
    llama_sampler_apply(g->sampler, &all);
    return one.logit > -INFINITY;
}

void chat_grammar_apply(chat_grammar *g, llama_token_data_array *candidates)
{
    if (idle(g)) return;
    if (g->matcher) matcher_apply(g->matcher, candidates);
    else llama_sampler_apply(g->sampler, candidates);
    for (size_t i = 0; i < candidates->size; i++) {
        if (!begins(g, candidates->data[i].id)) candidates->data[i].logit = -INFINITY;
    }
}

bool chat_grammar_failed(const chat_grammar *g) { return g->matcher && matcher_failed(g->matcher); }

/* Where the first of some texts begins in the tail, in what is new; SIZE_MAX: nowhere. Its length goes to *n. */
static size_t find(const chat_grammar *g, char *const *texts, size_t n_texts, size_t *n)
{
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < n_texts; i++) {
        size_t length = strlen(texts[i]);
        const char *at = length ? memmem(g->tail + g->from, g->n_tail - g->from, texts[i], length) : NULL;
        if (at && (size_t)(at - g->tail) < best) {
            best = (size_t)(at - g->tail);
            *n = length;
        }
    }
    return best;
}

/* What lies before `at` has been dealt with: forget the tokens that are wholly in there. */
static void advance(chat_grammar *g, size_t at)
{
    size_t n = 0, bytes = 0;
    while (n < g->n_held && bytes + g->held[n].n <= at) bytes += g->held[n++].n;
    memmove(g->held, g->held + n, (g->n_held - n) * sizeof *g->held);
    if (bytes > 0) memmove(g->tail, g->tail + bytes, g->n_tail - bytes);
    g->n_held -= n;
    g->n_tail -= bytes;
    g->from = at - bytes;
}

static bool hold(chat_grammar *g, llama_token token, const char *piece, size_t n)
{
    if (g->n_tail + n >= g->tail_room) {
        size_t room = 2 * (g->n_tail + n) + 64;
        char *grown = realloc(g->tail, room);
        if (!grown) return false;
        g->tail = grown;
        g->tail_room = room;
    }
    if (g->n_held == g->held_room) {
        size_t room = 2 * g->held_room + 32;
        held_token *grown = realloc(g->held, room * sizeof *grown);
        if (!grown) return false;
        g->held = grown;
        g->held_room = room;
    }
    memcpy(g->tail + g->n_tail, piece, n);
    g->n_tail += n;
    g->held[g->n_held++] = (held_token){token, n};
    return true;
}

/* The matcher sees the tokens from the trigger on, which begins in the first of them. An answer that goes on otherwise
 * than the grammar wants within the very token that the trigger ends in is no tool call: it is left alone. */
static void wake(chat_grammar *g)
{
    g->waiting = false;
    for (size_t i = 0; i < g->n_held && !g->off; i++)
        g->off = !matcher_accept_end(g->matcher, g->held[i].token, i == 0 ? g->from : 0);
    g->n_held = g->n_tail = g->from = 0;
}

/* Follow the answer's text into reasoning and out of it; where it is outside, and a word comes, wake up. */
static void follow(chat_grammar *g)
{
    const chat_rendering *r = &g->p->r;
    for (;;) {
        size_t length = 0, start_length = 0;
        if (g->thinking) {
            size_t end = find(g, r->think_ends.items, r->think_ends.n, &length);
            if (end == SIZE_MAX) break;
            g->thinking = false;
            advance(g, end + length);
        } else {
            size_t start = r->think_start ? find(g, (char *const[]){r->think_start}, 1, &start_length) : SIZE_MAX;
            size_t word = g->waiting ? find(g, r->words.items, r->words.n, &length) : SIZE_MAX;
            if (word < start) {
                advance(g, word);
                wake(g);
                return;
            }
            if (start == SIZE_MAX) break;
            g->thinking = true;
            advance(g, start + start_length);
        }
    }
    /* A text that is looked for may have begun in these bytes. */
    if (g->n_tail - g->from >= g->longest) advance(g, g->n_tail - g->longest + (g->longest > 0));
}

/* Whether the sampler, left to find its own trigger, has found it: then some token isn't allowed. */
static bool awake(chat_grammar *g)
{
    llama_token bos = llama_vocab_bos(g->p->vocab), eos = llama_vocab_eos(g->p->vocab);
    return (bos != LLAMA_TOKEN_NULL && !chat_grammar_allows(g, bos)) ||
           (eos != LLAMA_TOKEN_NULL && !chat_grammar_allows(g, eos));
}

static void note_beginning(chat_grammar *g, llama_token token)
{
    size_t left = g->p->r.begin ? strlen(g->p->r.begin + g->n_begun) : 0;
    char piece[MAX_PIECE_BYTES];
    int32_t got = left ? llama_token_to_piece(g->p->vocab, token, piece, sizeof piece, 0, true) : 0;
    if (got > 0) g->n_begun += (size_t)got < left ? (size_t)got : left;
}

bool chat_grammar_accept(chat_grammar *g, llama_token token)
{
    if (g->off) return true;
    if (!g->p->r.lazy) {
        if (!begins(g, token) || !matcher_accept(g->matcher, token)) return false;
        if (g->answering) note_beginning(g, token);
        return true;
    }

    const bool by_pattern = g->p->r.patterns.n > 0, thought = g->thinking;
    char piece[MAX_PIECE_BYTES];
    int32_t got = llama_token_to_piece(g->p->vocab, token, piece, sizeof piece, 0, true);
    size_t n = got > 0 ? (size_t)got : 0;
    if (g->waiting || by_pattern) {
        bool waited = g->waiting;
        if (!hold(g, token, piece, n)) return false;
        follow(g);
        if (waited) return true; /* the sampler has it, or is not to see it */
    }
    if (thought || g->thinking) return true;
    if (g->matcher) return matcher_accept(g->matcher, token);
    if (!chat_grammar_allows(g, token)) return false;
    if (!g->p->way->accept(g->sampler, token)) {
        /* A trigger with something behind it that isn't the grammar's, in one token; or a real mistake. */
        g->off = by_pattern;
        return by_pattern;
    }
    if (by_pattern && (g->n_pattern += n) > MAX_PATTERN_TEXT && !g->by_pattern_awake) {
        g->by_pattern_awake = awake(g);
        g->off = !g->by_pattern_awake;
    }
    return true;
}
