/* chat_match.c: a recogniser after Scott and Johnstone's GLL.
 *
 * An *item* is a place in the grammar together with what follows the rule that it is in: a *call*, which holds the
 * places to go on at, each with a call of its own. A rule that is called from several places at the same character gets
 * one call with several places. A rule that is called last leaves none: it goes on with the call of its caller, so that
 * what repeats itself at its end doesn't grow. Calls are made while a character is taken in and don't change later, so
 * to take a character back is to forget the calls that it made.
 *
 * Two calls that go on at the same places are one: behind each token they are put together, or what repeats itself
 * inside of what repeats itself would have one for each character at which it may have begun again. What still grows
 * then, as the text does, is paid for: see EARNED. */
#include "chat_match.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    MASK_WORDS = 16,        /* 64 items each; beyond these nothing is used again */
    STEP_WORK = 8,          /* of a place that is looked at for what can be reached from it; an item has 1 */
    /* Each token earns so much work for each byte by which the texts of the vocabulary differ, and so many tokens'
     * earnings are kept. Large schemas and usual grammars need 5 in the mean, and 13 for the dearest token. */
    EARNED = 100,
    KEPT = 4,
    LEAST_BYTES = 100000,   /* as many as a vocabulary of 50000 tokens has: with a smaller one it isn't less */
    FEW_ITEMS = 8,          /* up to here calls aren't put together, unless there are ... */
    MANY_CALLS = 1 << 10,   /* ... so many, or twice what was left of them */
};

#define NONE UINT32_MAX

struct match_words {
    const struct llama_vocab *vocab;
    size_t n;         /* of the vocabulary */
    bool *ends;       /* by token: it ends an answer */
    char *text;
    uint32_t *at;     /* [n + 1]: token i's text is text[at[i]..at[i + 1]) */
    uint32_t *order;  /* [n_order]: those with a text, sorted by it */
    uint32_t *shared; /* [n_order]: bytes that one has in common with the one before it */
    size_t n_order, longest;
    size_t earned; /* work, by each token */
};

typedef struct item {
    uint32_t at, call;
} item;

typedef struct place {
    uint32_t at, call, next; /* NONE: no more */
} place;

typedef struct rule_call {
    uint32_t places;
    bool over; /* its rule came to nothing at the character that it was called at */
} rule_call;

/* The text so far, and while a token is looked at, one more for each of its bytes. */
typedef struct level {
    size_t from, to, n_calls, n_places; /* its items, and what there was when it was done */
    bool end;                           /* the text may end here */
    uint32_t value;                     /* of a character that has begun ... */
    int left;                           /* ... and wants so many bytes more */
    /* Where its items come from: those of the level that has `source` for its own, of which these were met. */
    uint64_t own, source, mask[MASK_WORDS];
} level;

struct matcher {
    const gbnf *g;
    const match_words *w;
    item *items; /* of all levels */
    rule_call *calls; /* 0: of the root */
    place *places;
    size_t n_items, items_room, n_calls, calls_room, n_places, places_room;
    level *levels; /* [longest + 1] */
    size_t deepest;
    item *todo; /* places to look at */
    size_t n_todo, todo_room;
    uint32_t *called;     /* by rule: its call at this character, if ... */
    uint64_t *called_now; /* ... this is the number of the step */
    item *seen;           /* a table of those looked at in this step */
    uint64_t *seen_now;
    size_t seen_room, n_seen; /* a power of two */
    uint64_t step; /* counts characters taken in */
    size_t first_call; /* that this step made */
    bool end;          /* the root's rule came to its end in this step */
    uint64_t serial;
    size_t work, many; /* work that may still be done; calls from which on they are put together */
    bool failed;       /* no memory, or too much work: for good */
    bool *allowed;     /* by token */
};

/* ---- the words ---- */

typedef struct word {
    const char *text;
    uint32_t n, token;
} word;

static int by_text(const void *a, const void *b)
{
    const word *x = a, *y = b;
    int c = memcmp(x->text, y->text, x->n < y->n ? x->n : y->n);
    return c ? c : x->n != y->n ? (x->n < y->n ? -1 : 1) : x->token < y->token ? -1 : x->token > y->token;
}

/* All texts one behind the other. Those of tokens that end an answer are none. */
static bool read_texts(match_words *w)
{
    size_t room = 8 * w->n + 256, used = 0;
    w->text = malloc(room);
    if (!w->text) return false;
    for (size_t i = 0; i < w->n; i++) {
        llama_token token = (llama_token)i;
        w->at[i] = (uint32_t)used;
        w->ends[i] = llama_vocab_is_eog(w->vocab, token);
        int32_t got = w->ends[i] ? 0 : -1;
        while (got < 0) {
            got = llama_token_to_piece(w->vocab, token, w->text + used, (int32_t)(room - used), 0, true);
            if (got >= 0) break;
            room = 2 * room + (size_t)-got;
            char *grown = room < INT32_MAX ? realloc(w->text, room) : NULL;
            if (!grown) return false;
            w->text = grown;
        }
        size_t n = strnlen(w->text + used, (size_t)got);
        if (n > w->longest) w->longest = n;
        used += n;
    }
    w->at[w->n] = (uint32_t)used;
    return true;
}

static bool sort_texts(match_words *w)
{
    word *words = malloc((w->n + 1) * sizeof *words);
    if (!words) return false;
    for (size_t i = 0; i < w->n; i++) {
        uint32_t n = w->at[i + 1] - w->at[i];
        if (n > 0) words[w->n_order++] = (word){w->text + w->at[i], n, (uint32_t)i};
    }
    qsort(words, w->n_order, sizeof *words, by_text);
    size_t bytes = 0;
    for (size_t i = 0; i < w->n_order; i++) {
        uint32_t n = 0;
        while (i > 0 && n < words[i].n && n < words[i - 1].n && words[i].text[n] == words[i - 1].text[n]) n++;
        w->order[i] = words[i].token;
        w->shared[i] = n;
        bytes += words[i].n - n;
    }
    w->earned = EARNED * (bytes > LEAST_BYTES ? bytes : LEAST_BYTES);
    free(words);
    return true;
}

match_words *match_words_new(const struct llama_vocab *vocab)
{
    match_words *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->vocab = vocab;
    w->n = (size_t)llama_vocab_n_tokens(vocab);
    w->at = calloc(w->n + 1, sizeof *w->at);
    w->ends = calloc(w->n + 1, sizeof *w->ends);
    w->order = calloc(w->n + 1, sizeof *w->order);
    w->shared = calloc(w->n + 1, sizeof *w->shared);
    if (w->at && w->ends && w->order && w->shared && read_texts(w) && sort_texts(w)) return w;
    match_words_free(w);
    return NULL;
}

void match_words_free(match_words *w)
{
    if (!w) return;
    free(w->at);
    free(w->ends);
    free(w->order);
    free(w->shared);
    free(w->text);
    free(w);
}

/* ---- a step ---- */

static bool spend(matcher *m, size_t work)
{
    if (m->work < work) m->failed = true;
    else m->work -= work;
    return !m->failed;
}

/* Room for one more in an array. */
static bool grow(matcher *m, void *array, size_t n, size_t *room, size_t bytes)
{
    if (n < *room) return true;
    size_t more = 2 * *room + 64;
    void *grown = more < NONE ? realloc(*(void **)array, more * bytes) : NULL;
    if (!grown) {
        m->failed = true;
        return false;
    }
    *(void **)array = grown;
    *room = more;
    return true;
}

static size_t slot_of(const matcher *m, item i)
{
    uint64_t h = ((uint64_t)i.at << 32 | i.call) * 0x9e3779b97f4a7c15u;
    return (size_t)(h >> 32) & (m->seen_room - 1);
}

static bool grow_seen(matcher *m)
{
    size_t room = 4 * m->seen_room, before = m->seen_room;
    item *items = m->seen;
    uint64_t *now = m->seen_now;
    m->seen = calloc(room, sizeof *m->seen);
    m->seen_now = calloc(room, sizeof *m->seen_now);
    if (!m->seen || !m->seen_now) {
        m->failed = true;
        free(m->seen);
        free(m->seen_now);
        m->seen = items;
        m->seen_now = now;
        return false;
    }
    m->seen_room = room;
    for (size_t i = 0; i < before; i++) {
        if (now[i] != m->step) continue;
        size_t k = slot_of(m, items[i]);
        while (m->seen_now[k] == m->step) k = (k + 1) & (room - 1);
        m->seen[k] = items[i];
        m->seen_now[k] = m->step;
    }
    free(items);
    free(now);
    return true;
}

/* To be looked at, if it wasn't yet in this step. */
static void look(matcher *m, uint32_t at, uint32_t call)
{
    const item i = {at, call};
    size_t k = slot_of(m, i);
    for (; m->seen_now[k] == m->step; k = (k + 1) & (m->seen_room - 1)) {
        if (m->seen[k].at == at && m->seen[k].call == call) return;
    }
    if (!grow(m, &m->todo, m->n_todo, &m->todo_room, sizeof *m->todo)) return;
    m->seen[k] = i;
    m->seen_now[k] = m->step;
    m->todo[m->n_todo++] = i;
    if (2 * ++m->n_seen > m->seen_room) grow_seen(m);
}

static void look_at_rule(matcher *m, uint32_t rule, uint32_t call)
{
    for (uint32_t k = m->g->first[rule]; k < m->g->first[rule + 1]; k++) look(m, m->g->starts[k], call);
}

static void call_rule(matcher *m, uint32_t rule, uint32_t behind, uint32_t from)
{
    if (gbnf_is_end(m->g->elements[behind])) {
        look_at_rule(m, rule, from);
        return;
    }
    bool is_new = m->called_now[rule] != m->step;
    if (is_new) {
        if (!grow(m, &m->calls, m->n_calls, &m->calls_room, sizeof *m->calls)) return;
        m->calls[m->n_calls] = (rule_call){NONE, false};
        m->called[rule] = (uint32_t)m->n_calls++;
        m->called_now[rule] = m->step;
    }
    if (!grow(m, &m->places, m->n_places, &m->places_room, sizeof *m->places)) return;
    uint32_t number = m->called[rule];
    rule_call *c = &m->calls[number];
    m->places[m->n_places] = (place){behind, from, c->places};
    c->places = (uint32_t)m->n_places++;
    if (is_new) look_at_rule(m, rule, number);
    else if (c->over) look(m, behind, from);
}

static void finish(matcher *m, uint32_t number)
{
    if (number == 0) m->end = true;
    if (number >= m->first_call) m->calls[number].over = true;
    for (uint32_t p = m->calls[number].places; p != NONE; p = m->places[p].next)
        look(m, m->places[p].at, m->places[p].call);
}

static void begin_step(matcher *m)
{
    m->step++;
    m->n_seen = m->n_todo = 0;
    m->first_call = m->n_calls;
    m->end = false;
}

/* All that can be reached without a character: those that want one become items. False: see m->failed. */
static bool run_step(matcher *m)
{
    while (m->n_todo > 0 && !m->failed) {
        const item i = m->todo[--m->n_todo];
        const gbnf_element e = m->g->elements[i.at];
        spend(m, STEP_WORK);
        if (gbnf_is_end(e)) finish(m, i.call);
        else if (e.kind == GBNF_RULE) call_rule(m, e.value, i.at + 1, i.call);
        else if (grow(m, &m->items, m->n_items, &m->items_room, sizeof *m->items)) m->items[m->n_items++] = i;
    }
    return !m->failed;
}

/* ---- characters ---- */

static bool in_class(const gbnf *g, const gbnf_class *c, uint32_t character)
{
    if (character < 128) return c->ascii[character / 64] >> character % 64 & 1;
    bool found = false;
    for (uint32_t i = 0; i < c->n && !found; i++)
        found = g->ranges[c->first + i].low <= character && character <= g->ranges[c->first + i].high;
    return found != c->negated;
}

static bool meets(const gbnf *g, gbnf_element e, uint32_t character)
{
    switch (e.kind) {
    case GBNF_CHAR: return e.value == character;
    case GBNF_CLASS: return in_class(g, &g->classes[e.value], character);
    default: return e.kind == GBNF_ANY;
    }
}

/* Whether a character can come out of one that has begun: any of low..high. As llama.cpp has it, not if a class leaves
 * some of them out. */
static bool may_meet(const gbnf *g, gbnf_element e, uint32_t low, uint32_t high)
{
    if (e.kind == GBNF_CHAR) return low <= e.value && e.value <= high;
    if (e.kind != GBNF_CLASS) return e.kind == GBNF_ANY;
    const gbnf_class *c = &g->classes[e.value];
    for (uint32_t i = 0; i < c->n; i++) {
        const gbnf_range r = g->ranges[c->first + i];
        if (r.low <= high && low <= r.high) return !c->negated;
    }
    return c->negated;
}

/* Whether a text may stop here, as far as a token's end goes. */
static bool is_whole(const matcher *m, const level *l)
{
    if (l->left == 0) return true;
    uint32_t low = l->value << 6 * l->left, high = low | ((1u << 6 * l->left) - 1);
    if (l->left == 1 && l->value < 2) return false; /* two bytes where one would do */
    if (low == 0) low = l->left == 2 ? 1u << 11 : 1u << 16;
    for (size_t i = l->from; i < l->to; i++) {
        if (may_meet(m->g, m->g->elements[m->items[i].at], low, high)) return true;
    }
    return false;
}

static void go_back(matcher *m, const level *l)
{
    m->n_items = l->to;
    m->n_calls = l->n_calls;
    m->n_places = l->n_places;
}

static void note(matcher *m, level *l, size_t from)
{
    l->from = from;
    l->to = m->n_items;
    l->n_calls = m->n_calls;
    l->n_places = m->n_places;
    l->end = m->end;
    l->left = 0;
    l->own = ++m->serial;
}

/* From level k to the next by a character that is whole now. False: it can't come. */
static bool take_character(matcher *m, size_t k, uint32_t character)
{
    const level *from = &m->levels[k];
    level *to = &m->levels[k + 1];
    uint64_t mask[MASK_WORDS] = {0};
    const size_t n = from->to - from->from;
    const bool known = n <= 64 * MASK_WORDS;
    bool any = false;
    if (!spend(m, n)) return false;
    for (size_t i = 0; i < n; i++) {
        if (!meets(m->g, m->g->elements[m->items[from->from + i].at], character)) continue;
        any = true;
        if (!known) break;
        mask[i / 64] |= (uint64_t)1 << i % 64;
    }
    if (!any) return false;
    if (known && to->source == from->own && memcmp(to->mask, mask, sizeof mask) == 0) {
        go_back(m, to);
        return to->to > to->from || to->end;
    }
    for (size_t i = k + 1; i <= m->deepest; i++) m->levels[i].source = 0; /* their calls are written over */
    m->deepest = k + 1;
    go_back(m, from);
    begin_step(m);
    for (size_t i = 0; i < n; i++) {
        const item it = m->items[from->from + i];
        if (known ? mask[i / 64] >> i % 64 & 1 : meets(m->g, m->g->elements[it.at], character))
            look(m, it.at + 1, it.call);
    }
    if (!run_step(m)) return false;
    note(m, to, from->to);
    if (known) {
        to->source = from->own;
        memcpy(to->mask, mask, sizeof mask);
    }
    return to->to > to->from || to->end;
}

static bool take_byte(matcher *m, size_t k, unsigned char byte)
{
    const level *from = &m->levels[k];
    uint32_t value = byte;
    int left = 0;
    if (from->left > 0) {
        if ((byte & 0xc0) != 0x80) return false;
        value = from->value << 6 | (byte & 0x3f);
        left = from->left - 1;
    } else if (byte >= 0x80) {
        if (byte < 0xc0) return false;
        left = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
        value = byte & (0x7fu >> left);
    }
    if (left == 0) return take_character(m, k, value);
    level *to = &m->levels[k + 1];
    to->from = from->from;
    to->to = from->to;
    to->n_calls = from->n_calls;
    to->n_places = from->n_places;
    to->end = false;
    to->value = value;
    to->left = left;
    to->own = from->own;
    to->source = 0;
    if (m->deepest < k + 1) m->deepest = k + 1;
    return to->to > to->from;
}

/* ---- tokens ---- */

static bool take_text(matcher *m, const char *text, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        if (!take_byte(m, k, (unsigned char)text[k])) return false;
    }
    return n > 0 && is_whole(m, &m->levels[n]);
}

static bool meets_token(gbnf_element e, llama_token token)
{
    return (e.kind == GBNF_TOKEN && e.value == (uint32_t)token) ||
           (e.kind == GBNF_NO_TOKEN && e.value != (uint32_t)token);
}

static bool is_known(const matcher *m, llama_token token)
{
    return token >= 0 && (size_t)token < m->w->n;
}

static const char *text_of(const matcher *m, llama_token token, size_t *n)
{
    *n = m->w->at[token + 1] - m->w->at[token];
    return m->w->text + m->w->at[token];
}

bool matcher_allows(matcher *m, llama_token token)
{
    const level *now = &m->levels[0];
    if (!is_known(m, token) || m->failed) return false;
    if (m->w->ends[token]) return now->end;
    size_t n;
    const char *text = text_of(m, token, &n);
    if (n == 0) return false;
    for (size_t i = now->from; i < now->to; i++) {
        if (meets_token(m->g->elements[m->items[i].at], token)) return true;
    }
    return take_text(m, text, n);
}

/* Which tokens may come by their texts: in their order, from what each has in common with the one before it. */
static void find_allowed(matcher *m)
{
    const match_words *w = m->w;
    size_t alive = 0;   /* bytes that were taken; levels[alive] is the last one */
    bool dead = false;  /* the byte behind them wasn't */
    memset(m->allowed, 0, w->n * sizeof *m->allowed);
    for (size_t i = 0; i < w->n_order && !m->failed; i++) {
        size_t n;
        const char *text = text_of(m, (llama_token)w->order[i], &n);
        if (dead && w->shared[i] > alive) continue;
        if (w->shared[i] < alive) alive = w->shared[i];
        dead = false;
        while (alive < n && !dead) {
            dead = !take_byte(m, alive, (unsigned char)text[alive]);
            alive += !dead;
        }
        m->allowed[w->order[i]] = !dead && is_whole(m, &m->levels[alive]);
    }
}

void matcher_apply(matcher *m, llama_token_data_array *candidates)
{
    const level *now = &m->levels[0];
    find_allowed(m);
    for (size_t i = now->from; i < now->to; i++) {
        const gbnf_element e = m->g->elements[m->items[i].at];
        if (e.kind == GBNF_TOKEN && e.value < m->w->n) m->allowed[e.value] = true;
        for (size_t k = 0; e.kind == GBNF_NO_TOKEN && k < m->w->n; k++) m->allowed[k] |= k != e.value;
    }
    for (size_t i = 0; i < candidates->size; i++) {
        llama_token token = candidates->data[i].id;
        bool known = is_known(m, token), ends = known && m->w->ends[token];
        if (m->failed || !known || (ends ? !now->end : !m->allowed[token] || m->w->at[token + 1] == m->w->at[token]))
            candidates->data[i].logit = -INFINITY;
    }
}

/* ---- calls put together ---- */

/* What put_together() works with. */
typedef struct union_of_calls {
    matcher *m;
    uint32_t *number; /* [n_calls]: what a call becomes, and 1; 0: not yet known */
    uint32_t *path;   /* [n_calls]: calls of which the first places are known ... */
    uint32_t *next;   /* ... from this place of each on, they aren't */
    place *kept;      /* [n_kept]: of the calls that are left; of each one behind the other, in order */
    uint32_t *first;  /* [n_left + 1] in `kept` */
    uint32_t *table;  /* [room]: a left call and 1, by its places */
    size_t n_kept, n_left, room;
} union_of_calls;

static int by_place(const void *a, const void *b)
{
    const place *x = a, *y = b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->call < y->call ? -1 : x->call > y->call;
}

static int by_item(const void *a, const void *b)
{
    const item *x = a, *y = b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->call < y->call ? -1 : x->call > y->call;
}

/* All calls that its places lead to are known: number it, as one that is there already if that goes on alike. */
static void leave_call(union_of_calls *u, uint32_t call)
{
    const matcher *m = u->m;
    place *own = u->kept + u->n_kept;
    size_t n = 0, n_own = 0;
    for (uint32_t p = m->calls[call].places; p != NONE; p = m->places[p].next)
        own[n++] = (place){m->places[p].at, u->number[m->places[p].call] - 1, NONE};
    qsort(own, n, sizeof *own, by_place);
    uint64_t hash = n;
    for (size_t i = 0; i < n; i++) {
        if (n_own > 0 && by_place(&own[n_own - 1], &own[i]) == 0) continue;
        hash = (hash ^ ((uint64_t)own[i].at << 32 | own[i].call)) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
        own[n_own++] = own[i];
    }
    size_t k = hash & (u->room - 1);
    for (; u->table[k] != 0; k = (k + 1) & (u->room - 1)) {
        const uint32_t other = u->table[k] - 1;
        const size_t from = u->first[other];
        if (u->first[other + 1] - from != n_own || memcmp(u->kept + from, own, n_own * sizeof *own) != 0) continue;
        u->number[call] = other + 1;
        return;
    }
    u->table[k] = (uint32_t)++u->n_left;
    u->n_kept += n_own;
    u->first[u->n_left] = (uint32_t)u->n_kept;
    u->number[call] = (uint32_t)u->n_left;
}

/* A call, behind those that it leads to. No rule calls itself at the same character, as a left recursive one would, so
 * none leads back to itself; false: one does. */
static bool leave_calls(union_of_calls *u, uint32_t call)
{
    const matcher *m = u->m;
    size_t n = 0;
    if (u->number[call]) return true;
    u->path[n] = call;
    u->next[n++] = m->calls[call].places;
    while (n > 0) {
        uint32_t p = u->next[n - 1];
        while (p != NONE && u->number[m->places[p].call]) p = m->places[p].next;
        if (p == NONE) {
            leave_call(u, u->path[--n]);
        } else if (n == m->n_calls) {
            return false;
        } else {
            u->next[n - 1] = p;
            u->path[n] = m->places[p].call;
            u->next[n++] = m->calls[m->places[p].call].places;
        }
    }
    return true;
}

/* Calls that go on alike become one, and those that no item leads to none. Where there is no memory all stay. */
static void put_together(matcher *m)
{
    union_of_calls u = {.m = m, .room = 16};
    while (u.room < 2 * m->n_calls) u.room *= 2;
    u.number = calloc(m->n_calls, sizeof *u.number);
    u.path = malloc(m->n_calls * sizeof *u.path);
    u.next = malloc(m->n_calls * sizeof *u.next);
    u.kept = malloc((m->n_places + 1) * sizeof *u.kept);
    u.first = calloc(m->n_calls + 1, sizeof *u.first);
    u.table = calloc(u.room, sizeof *u.table);
    if (!u.number || !u.path || !u.next || !u.kept || !u.first || !u.table) goto out;
    bool ok = leave_calls(&u, 0); /* the root's stays the first one */
    for (size_t i = 0; ok && i < m->n_items; i++) ok = leave_calls(&u, m->items[i].call);
    if (!ok) goto out;
    for (size_t i = 0; i < m->n_items; i++) m->items[i].call = u.number[m->items[i].call] - 1;
    for (size_t i = 0; i < u.n_left; i++) {
        m->calls[i] = (rule_call){u.first[i] < u.first[i + 1] ? u.first[i] : NONE, false};
        for (uint32_t p = u.first[i]; p + 1 < u.first[i + 1]; p++) u.kept[p].next = p + 1;
    }
    memcpy(m->places, u.kept, u.n_kept * sizeof *u.kept);
    m->n_calls = u.n_left;
    m->n_places = u.n_kept;
    size_t n = 0;
    qsort(m->items, m->n_items, sizeof *m->items, by_item);
    for (size_t i = 0; i < m->n_items; i++) {
        if (n == 0 || by_item(&m->items[n - 1], &m->items[i]) != 0) m->items[n++] = m->items[i];
    }
    m->n_items = n;
out:
    m->many = 2 * m->n_calls > MANY_CALLS ? 2 * m->n_calls : MANY_CALLS;
    free(u.table);
    free(u.first);
    free(u.kept);
    free(u.next);
    free(u.path);
    free(u.number);
}

bool matcher_accept_end(matcher *m, llama_token token, size_t skipped)
{
    level *now = &m->levels[0];
    if (!is_known(m, token) || m->failed) return false;
    if (m->w->ends[token]) return now->end;
    size_t n;
    const char *text = text_of(m, token, &n);
    if (n <= skipped) return false;
    text += skipped;
    n -= skipped;
    const bool by_text = take_text(m, text, n);
    if (m->failed) return false;
    const level *last = by_text ? &m->levels[n] : now;
    const size_t from = by_text ? last->from : now->to;
    const bool end = by_text && last->end;
    for (size_t i = 1; i <= m->deepest; i++) m->levels[i].source = 0;
    /* Those that want this very token go on behind the others. */
    go_back(m, last);
    begin_step(m);
    for (size_t i = now->from; i < now->to; i++) {
        if (meets_token(m->g->elements[m->items[i].at], token)) look(m, m->items[i].at + 1, m->items[i].call);
    }
    bool by_token = m->n_todo > 0;
    if ((!by_text && !by_token) || !run_step(m)) return false;
    const int left = by_text ? last->left : 0;
    const uint32_t value = by_text ? last->value : 0;
    m->end |= end;
    m->n_items -= from;
    memmove(m->items, m->items + from, m->n_items * sizeof *m->items);
    if (m->n_items > FEW_ITEMS || m->n_calls > m->many) put_together(m);
    m->work = m->work + m->w->earned < KEPT * m->w->earned ? m->work + m->w->earned : KEPT * m->w->earned;
    m->deepest = 0;
    note(m, now, 0);
    now->left = left;
    now->value = value;
    return true;
}

bool matcher_accept(matcher *m, llama_token token)
{
    return matcher_accept_end(m, token, 0);
}

bool matcher_failed(const matcher *m) { return m->failed; }

matcher *matcher_new(const gbnf *g, const match_words *w)
{
    matcher *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->g = g;
    m->w = w;
    m->seen_room = 256;
    m->many = MANY_CALLS;
    m->levels = calloc(w->longest + 2, sizeof *m->levels);
    m->called = calloc(g->n_rules, sizeof *m->called);
    m->called_now = calloc(g->n_rules, sizeof *m->called_now);
    m->seen = calloc(m->seen_room, sizeof *m->seen);
    m->seen_now = calloc(m->seen_room, sizeof *m->seen_now);
    m->allowed = calloc(w->n + 1, sizeof *m->allowed);
    if (!m->levels || !m->called || !m->called_now || !m->seen || !m->seen_now || !m->allowed) goto fail;
    if (!grow(m, &m->calls, 0, &m->calls_room, sizeof *m->calls)) goto fail;
    m->calls[m->n_calls++] = (rule_call){NONE, false};
    m->work = KEPT * w->earned;
    begin_step(m);
    look_at_rule(m, g->root, 0);
    if (!run_step(m)) goto fail;
    note(m, &m->levels[0], 0);
    return m;
fail:
    matcher_free(m);
    return NULL;
}

void matcher_free(matcher *m)
{
    if (!m) return;
    free(m->items);
    free(m->calls);
    free(m->places);
    free(m->levels);
    free(m->todo);
    free(m->called);
    free(m->called_now);
    free(m->seen);
    free(m->seen_now);
    free(m->allowed);
    free(m);
}
