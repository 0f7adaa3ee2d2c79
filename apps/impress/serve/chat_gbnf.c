#include "chat_gbnf.h"

#include <jansson.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tokenize.h"

enum {
    MAX_DEPTH = 128,           /* of parentheses, which are read recursively */
    MAX_REPETITIONS = 2000,    /* llama.cpp's: it takes more for endless, or refuses */
    MAX_BYTES = 128 << 20,
    MAX_WAYS = 10000,          /* an enumeration has one for each of its values */
    MAX_VISITS = 10000,
    MAX_WORK = 50000000,
    ELEMENT_BYTES = 16,        /* llama.cpp's 8, in two copies */
    RULE_BYTES = 224,          /* two vectors, and the node of a map that holds its name */
};

#define MANY (SIZE_MAX / 4)

static const char not_gbnf[] = "isn't GBNF with a rule `root`", no_memory[] = "is too large for this server's memory",
                  too_large[] = "repeats too much", left_recursive[] = "is left recursive";

typedef struct elements {
    gbnf_element *items;
    size_t n, room;
} elements;

typedef struct gbnf_rule {
    gbnf_element *items; /* [n], NULL: not defined. Ends with GBNF_END */
    size_t n;
} gbnf_rule;

typedef struct reader {
    const char *at;
    const struct llama_vocab *vocab; /* NULL: which tokens are meant isn't asked */
    gbnf_class *classes;
    gbnf_range *ranges;
    size_t n_classes, classes_room, n_ranges, ranges_room;
    gbnf_rule *rules;
    size_t n_rules, rules_room; /* as many as names and generated ones */
    json_t *names;              /* of those that have one: their numbers */
    size_t bytes, depth;
    bool exact; /* a number of repetitions that llama.cpp would take for endless is a fault */
    const char *fault;
} reader;

static size_t plus(size_t a, size_t b)
{
    return a > MANY - b ? MANY : a + b; /* both are at most MANY */
}

/* ---- reading, as llama.cpp does ---- */

static bool fails(reader *r, const char *fault)
{
    if (!r->fault) r->fault = fault;
    return false;
}

static bool spend(reader *r, size_t bytes)
{
    r->bytes = plus(r->bytes, bytes);
    return r->bytes <= MAX_BYTES || fails(r, too_large);
}

static bool is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static void skip_space(reader *r, bool newlines)
{
    for (;; r->at++) {
        if (*r->at == '#') r->at += strcspn(r->at, "\r\n");
        bool newline = *r->at == '\r' || *r->at == '\n';
        if (*r->at != ' ' && *r->at != '\t' && !(newline && newlines)) return;
    }
}

static bool push(reader *r, elements *e, gbnf_kind kind, uint32_t value)
{
    if (e->n == e->room) {
        size_t room = 2 * e->room + 8;
        gbnf_element *grown = realloc(e->items, room * sizeof *grown);
        if (!grown) return fails(r, no_memory);
        e->items = grown;
        e->room = room;
    }
    e->items[e->n++] = (gbnf_element){kind, value};
    return spend(r, ELEMENT_BYTES);
}

/* The elements e[from, to) once more at the end of another list, or the same. */
static bool push_again(reader *r, elements *to, const elements *from, size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++) {
        if (!push(r, to, from->items[i].kind, from->items[i].value)) return false;
    }
    return true;
}

/* A rule more. `n_name`: bytes of the name that llama.cpp keeps for it. */
static bool new_rule(reader *r, size_t n_name, uint32_t *number)
{
    if (r->n_rules == r->rules_room) {
        size_t room = 2 * r->rules_room + 16;
        gbnf_rule *grown = realloc(r->rules, room * sizeof *grown);
        if (!grown) return fails(r, no_memory);
        r->rules = grown;
        r->rules_room = room;
    }
    r->rules[r->n_rules] = (gbnf_rule){0};
    *number = (uint32_t)r->n_rules++;
    return spend(r, RULE_BYTES + n_name);
}

/* The last definition counts. */
static bool define(reader *r, uint32_t number, elements *e)
{
    if (!push(r, e, GBNF_END, 0)) return false;
    free(r->rules[number].items);
    r->rules[number] = (gbnf_rule){e->items, e->n};
    *e = (elements){0};
    return true;
}

static bool read_name(reader *r, uint32_t *number, size_t *n_name)
{
    size_t n = 0;
    while (is_word(r->at[n])) n++;
    if (n == 0) return fails(r, not_gbnf);
    char *name = strndup(r->at, n);
    if (!name) return fails(r, no_memory);
    const json_t *known = json_object_get(r->names, name);
    bool ok = true;
    if (known) {
        *number = (uint32_t)json_integer_value(known);
    } else {
        ok = new_rule(r, n, number);
        if (ok && json_object_set_new_nocheck(r->names, name, json_integer(*number)) != 0) ok = fails(r, no_memory);
    }
    free(name);
    r->at += n;
    if (n_name) *n_name = n;
    return ok;
}

static bool read_digits(reader *r, int n, uint32_t *c)
{
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    *c = 0;
    for (r->at += 2; n > 0; n--, r->at++) {
        const char *digit = *r->at ? strchr(digits, *r->at) : NULL;
        if (!digit) return fails(r, not_gbnf);
        *c = 16 * *c + (uint32_t)(digit - digits) % 16;
    }
    return true;
}

/* A character of a literal or a class. */
static bool read_char(reader *r, uint32_t *c)
{
    static const char escapes[] = "trn\\\"[]-", meant[] = "\t\r\n\\\"[]-";
    const unsigned char *s = (const unsigned char *)r->at;
    if (*s == '\0') return fails(r, not_gbnf);
    if (*s == '\\') {
        if (s[1] == 'x') return read_digits(r, 2, c);
        if (s[1] == 'u') return read_digits(r, 4, c);
        if (s[1] == 'U') return read_digits(r, 8, c);
        const char *escape = s[1] ? strchr(escapes, s[1]) : NULL;
        if (!escape) return fails(r, not_gbnf);
        *c = (unsigned char)meant[escape - escapes];
        r->at += 2;
        return true;
    }
    size_t n = *s < 0xc0 ? 1 : *s < 0xe0 ? 2 : *s < 0xf0 ? 3 : 4;
    *c = n == 1 ? *s & 0x7fu : *s & (0xffu >> (n + 1));
    for (r->at++; n > 1 && *r->at; n--) *c = *c << 6 | (*r->at++ & 0x3f);
    return true;
}

static bool read_literal(reader *r, elements *e)
{
    uint32_t c;
    for (r->at++; *r->at != '"';) {
        if (!read_char(r, &c) || !push(r, e, GBNF_CHAR, c)) return false;
    }
    r->at++;
    return true;
}

static bool push_range(reader *r, uint32_t low, uint32_t high)
{
    if (r->n_ranges == r->ranges_room) {
        size_t room = 2 * r->ranges_room + 16;
        gbnf_range *grown = realloc(r->ranges, room * sizeof *grown);
        if (!grown) return fails(r, no_memory);
        r->ranges = grown;
        r->ranges_room = room;
    }
    r->ranges[r->n_ranges++] = (gbnf_range){low, high};
    return spend(r, ELEMENT_BYTES);
}

/* One of nothing, as [] and [^] are, adds nothing. */
static bool read_class(reader *r, elements *e)
{
    gbnf_class c = {.first = (uint32_t)r->n_ranges, .negated = r->at[1] == '^'};
    r->at += c.negated ? 2 : 1;
    while (*r->at != ']') {
        uint32_t low, high;
        if (!read_char(r, &low)) return false;
        high = low;
        if (*r->at == '-' && r->at[1] != ']') {
            r->at++;
            if (!read_char(r, &high)) return false;
        }
        if (!push_range(r, low, high)) return false;
        for (uint32_t k = low; k <= high && k < 128; k++) c.ascii[k / 64] |= (uint64_t)1 << k % 64;
    }
    r->at++;
    c.n = (uint32_t)r->n_ranges - c.first;
    if (c.n == 0) return true;
    if (c.negated) c.ascii[0] = ~c.ascii[0], c.ascii[1] = ~c.ascii[1];
    if (r->n_classes == r->classes_room) {
        size_t room = 2 * r->classes_room + 16;
        gbnf_class *grown = realloc(r->classes, room * sizeof *grown);
        if (!grown) return fails(r, no_memory);
        r->classes = grown;
        r->classes_room = room;
    }
    r->classes[r->n_classes++] = c;
    return push(r, e, GBNF_CLASS, (uint32_t)r->n_classes - 1);
}

/* <[NUMBER]>, or <TEXT> of which the brackets are a part. */
static bool read_token(reader *r, elements *e)
{
    bool other = *r->at == '!';
    r->at += other;
    const char *begin = r->at, *end = *begin == '<' ? strchr(begin, '>') : NULL;
    if (!end) return fails(r, not_gbnf);
    r->at = end + 1;
    llama_token token[2] = {LLAMA_TOKEN_NULL};
    if (begin[1] == '[') {
        char *behind;
        unsigned long number = is_digit(begin[2]) ? strtoul(begin + 2, &behind, 10) : ULONG_MAX;
        if (number > INT32_MAX || behind[0] != ']' || behind + 1 != end) return fails(r, not_gbnf);
        token[0] = (llama_token)number;
    } else if (r->vocab && app_tokenize(r->vocab, begin, (size_t)(r->at - begin), token, 2, false, true) != 1) {
        return fails(r, not_gbnf);
    }
    return push(r, e, other ? GBNF_NO_TOKEN : GBNF_TOKEN, (uint32_t)token[0]);
}

/* A number of repetitions; more than are kept: as many and one. */
static bool read_times(reader *r, size_t *times)
{
    if (!is_digit(*r->at)) return fails(r, not_gbnf);
    for (*times = 0; is_digit(*r->at); r->at++) {
        if (*times <= MAX_REPETITIONS) *times = 10 * *times + (size_t)(*r->at - '0');
    }
    return true;
}

/* {m}, {m,}, {m,n}: *most SIZE_MAX where there is no end. */
static bool read_braces(reader *r, bool nested, size_t *least, size_t *most)
{
    r->at++;
    skip_space(r, nested);
    if (!read_times(r, least)) return false;
    skip_space(r, nested);
    *most = *least;
    if (*r->at == ',') {
        r->at++;
        skip_space(r, nested);
        *most = SIZE_MAX;
        if (is_digit(*r->at)) {
            if (!read_times(r, most)) return false;
            skip_space(r, nested);
        }
    }
    if (*r->at++ != '}') return fails(r, not_gbnf);
    skip_space(r, nested);
    bool many = *most != SIZE_MAX && *most > MAX_REPETITIONS;
    if (*least > MAX_REPETITIONS || (many && r->exact)) return fails(r, "repeats something more than 2000 times");
    if (many) *most = SIZE_MAX;
    /* llama.cpp would count down from the one to the other, past 0. */
    return *most >= *least || fails(r, "repeats something at most fewer times than at least");
}

/* What stands in e from `last` on, so many times: S{m,n} becomes S S ... S1, S1 ::= S S2 | "", S2 ::= S S3 | "", ... */
static bool repeat(reader *r, elements *e, size_t last, size_t n_name, size_t least, size_t most)
{
    size_t end = e->n;
    if (last == end) return fails(r, not_gbnf);
    bool endless = most == SIZE_MAX, ok = true;
    elements once = {0};
    ok = push_again(r, &once, e, last, end);
    if (least == 0) e->n = last;
    for (size_t i = 1; ok && i < least; i++) ok = push_again(r, e, &once, 0, end - last);
    uint32_t before = 0, number = 0;
    size_t n_optional = endless ? 1 : most - least;
    for (size_t i = 0; ok && i < n_optional; i++) {
        elements optional = {0};
        ok = new_rule(r, n_name, &number) && push_again(r, &optional, &once, 0, once.n) &&
             (!(i > 0 || endless) || push(r, &optional, GBNF_RULE, endless ? number : before)) &&
             push(r, &optional, GBNF_ALT, 0) && define(r, number, &optional);
        free(optional.items);
        before = number;
    }
    if (ok && n_optional > 0) ok = push(r, e, GBNF_RULE, number);
    free(once.items);
    return ok;
}

static bool read_alternatives(reader *r, uint32_t number, size_t n_name, bool nested);

static bool read_group(reader *r, elements *e, size_t n_name)
{
    uint32_t number;
    if (++r->depth > MAX_DEPTH) return fails(r, "nests too many parentheses");
    r->at++;
    skip_space(r, true);
    if (!new_rule(r, n_name, &number) || !read_alternatives(r, number, n_name, true)) return false;
    if (*r->at++ != ')') return fails(r, not_gbnf);
    r->depth--;
    return push(r, e, GBNF_RULE, number);
}

static bool read_sequence(reader *r, elements *e, size_t n_name, bool nested)
{
    size_t last = e->n; /* where that begins which a repetition would be of */
    for (;;) {
        char c = *r->at;
        size_t least = c == '+', most = c == '?' ? 1 : SIZE_MAX;
        bool ok = true, repeats = c && strchr("*+?{", c);
        if (!repeats) last = e->n;
        if (c == '"') ok = read_literal(r, e);
        else if (c == '[') ok = read_class(r, e);
        else if (c == '<' || c == '!') ok = read_token(r, e);
        else if (c == '(') ok = read_group(r, e, n_name);
        else if (is_word(c)) {
            uint32_t number;
            ok = read_name(r, &number, NULL) && push(r, e, GBNF_RULE, number);
        } else if (c == '.') {
            r->at++;
            ok = push(r, e, GBNF_ANY, 0);
        } else if (c == '{') ok = read_braces(r, nested, &least, &most);
        else if (repeats) r->at++;
        else return true;
        if (ok) skip_space(r, nested);
        if (ok && repeats) ok = repeat(r, e, last, n_name, least, most);
        if (!ok) return false;
    }
}

static bool read_alternatives(reader *r, uint32_t number, size_t n_name, bool nested)
{
    elements e = {0};
    bool ok = read_sequence(r, &e, n_name, nested);
    while (ok && *r->at == '|') {
        r->at++;
        skip_space(r, true);
        ok = push(r, &e, GBNF_ALT, 0) && read_sequence(r, &e, n_name, nested);
    }
    ok = ok && define(r, number, &e);
    free(e.items);
    return ok;
}

static bool read_rule(reader *r)
{
    uint32_t number;
    size_t n_name;
    if (!read_name(r, &number, &n_name)) return false;
    skip_space(r, false);
    if (strncmp(r->at, "::=", 3) != 0) return fails(r, not_gbnf);
    r->at += 3;
    skip_space(r, true);
    if (!read_alternatives(r, number, n_name, false)) return false;
    if (*r->at && *r->at != '\r' && *r->at != '\n') return fails(r, not_gbnf);
    skip_space(r, true);
    return true;
}

static bool read_all(reader *r)
{
    r->names = json_object();
    if (!r->names) return fails(r, no_memory);
    skip_space(r, true);
    while (*r->at) {
        if (!read_rule(r)) return false;
    }
    if (!json_object_get(r->names, "root")) return fails(r, not_gbnf);
    for (size_t i = 0; i < r->n_rules; i++) {
        if (!r->rules[i].items) return fails(r, not_gbnf);
    }
    return true;
}

static void reader_free(reader *r)
{
    for (size_t i = 0; i < r->n_rules; i++) free(r->rules[i].items);
    free(r->rules);
    free(r->classes);
    free(r->ranges);
    json_decref(r->names);
}

/* ---- which rules may come to nothing ---- */

/* Those that have an empty alternative. */
static void find_plainly_empty(const reader *r, bool *empty)
{
    for (size_t i = 0; i < r->n_rules; i++) {
        const gbnf_rule *u = &r->rules[i];
        for (size_t k = 0; k < u->n; k++) {
            if (gbnf_is_end(u->items[k]) && (k == 0 || gbnf_is_end(u->items[k - 1]))) empty[i] = true;
        }
    }
}

/* All: each alternative that is of rules only waits for the first of them that isn't known to be empty. */
typedef struct waiting {
    uint32_t rule, at; /* of the alternative: its rule, and the gbnf_element */
    uint32_t next;     /* that waits for the same; 0: none */
} waiting;

static bool find_empty(const reader *r, bool *empty)
{
    size_t n_alternatives = 1, n_todo = 0;
    for (size_t i = 0; i < r->n_rules; i++) {
        for (size_t k = 0; k < r->rules[i].n; k++) n_alternatives += gbnf_is_end(r->rules[i].items[k]);
    }
    waiting *w = calloc(n_alternatives, sizeof *w);
    uint32_t *first = calloc(r->n_rules, sizeof *first), *todo = calloc(n_alternatives, sizeof *todo);
    bool ok = w && first && todo;
    size_t at = 1;
    for (size_t i = 0; ok && i < r->n_rules; i++) {
        for (size_t k = 0; k < r->rules[i].n; k++) {
            if (k > 0 && !gbnf_is_end(r->rules[i].items[k - 1])) continue;
            w[at] = (waiting){(uint32_t)i, (uint32_t)k, 0};
            todo[n_todo++] = (uint32_t)at++;
        }
    }
    while (ok && n_todo > 0) {
        uint32_t me = todo[--n_todo];
        const gbnf_element *e = &r->rules[w[me].rule].items[w[me].at];
        while (e->kind == GBNF_RULE && empty[e->value]) e++, w[me].at++;
        if (e->kind == GBNF_RULE) {
            w[me].next = first[e->value];
            first[e->value] = me;
        } else if (gbnf_is_end(*e) && !empty[w[me].rule]) {
            empty[w[me].rule] = true;
            for (uint32_t other = first[w[me].rule]; other; other = w[other].next) todo[n_todo++] = other;
            first[w[me].rule] = 0;
        }
    }
    free(todo);
    free(first);
    free(w);
    return ok;
}

/* ---- what comes first ---- */

/* A walk through the rules by what an alternative may begin with: strongly connected components after Tarjan, each
 * after those that it leads to. */
typedef struct visit {
    uint32_t rule, at; /* the element that is looked at */
    bool leading;      /* it can be what the alternative begins with */
} visit;

typedef struct walk {
    const reader *r;
    const bool *empty;
    size_t *value;            /* by rule: the number that is worked out, of finished ones */
    size_t *work;             /* elements looked at from there on; NULL: isn't asked for */
    uint32_t *order, *low;    /* order 0: not seen */
    bool *finished;
    visit *path;
    uint32_t *open;           /* seen, not finished */
    size_t n_path, n_open, n_seen;
} walk;

static bool walk_new(walk *w, const reader *r, const bool *empty)
{
    size_t n = r->n_rules;
    *w = (walk){.r = r, .empty = empty};
    w->value = calloc(n, sizeof *w->value);
    w->work = calloc(n, sizeof *w->work);
    w->order = calloc(n, sizeof *w->order);
    w->low = calloc(n, sizeof *w->low);
    w->finished = calloc(n, sizeof *w->finished);
    w->path = calloc(n, sizeof *w->path);
    w->open = calloc(n, sizeof *w->open);
    return w->value && w->work && w->order && w->low && w->finished && w->path && w->open;
}

static void walk_free(walk *w)
{
    free(w->value);
    free(w->work);
    free(w->order);
    free(w->low);
    free(w->finished);
    free(w->path);
    free(w->open);
}

static void enter(walk *w, uint32_t rule)
{
    w->order[rule] = w->low[rule] = (uint32_t)++w->n_seen;
    w->open[w->n_open++] = rule;
    w->path[w->n_path++] = (visit){rule, 0, true};
}

/* All of a component is known. A rule leads back to itself: fine, unless something follows, as then a stack grows and
 * grows. `strict`: not fine in any case. */
static bool finish(walk *w, uint32_t top, bool strict)
{
    size_t from = w->n_open, value = 0, work = 0;
    while (w->open[from - 1] != top) from--;
    for (size_t i = --from; i < w->n_open; i++) {
        const gbnf_rule *u = &w->r->rules[w->open[i]];
        bool leading = true;
        work = plus(work, u->n);
        for (size_t k = 0; k < u->n; k++) {
            const gbnf_element e = u->items[k];
            if (gbnf_is_end(e)) {
                value = plus(value, 1);
            } else if (leading && e.kind == GBNF_RULE) {
                bool inside = !w->finished[e.value];
                if (inside && (strict || !gbnf_is_end(u->items[k + 1]))) return false;
                if (!inside) {
                    value = plus(value, w->value[e.value]);
                    work = plus(work, w->work[e.value]);
                }
            }
            leading = gbnf_is_end(e) || (leading && e.kind == GBNF_RULE && w->empty[e.value]);
        }
    }
    for (size_t i = from; i < w->n_open; i++) {
        w->value[w->open[i]] = value;
        w->work[w->open[i]] = work;
    }
    for (size_t i = from; i < w->n_open; i++) w->finished[w->open[i]] = true;
    w->n_open = from;
    return true;
}

/* False: left recursion. */
static bool walk_from(walk *w, uint32_t start, bool strict)
{
    enter(w, start);
    while (w->n_path > 0) {
        visit *v = &w->path[w->n_path - 1];
        const gbnf_rule *u = &w->r->rules[v->rule];
        if (v->at == u->n) {
            uint32_t rule = v->rule;
            w->n_path--;
            if (w->n_path > 0) {
                uint32_t above = w->path[w->n_path - 1].rule;
                if (w->low[rule] < w->low[above]) w->low[above] = w->low[rule];
            }
            if (w->low[rule] == w->order[rule] && !finish(w, rule, strict)) return false;
            continue;
        }
        const gbnf_element e = u->items[v->at++];
        bool follow = v->leading && e.kind == GBNF_RULE;
        v->leading = gbnf_is_end(e) || (follow && w->empty[e.value]);
        if (!follow || w->finished[e.value]) continue;
        if (w->order[e.value] == 0) enter(w, e.value);
        else if (w->order[e.value] < w->low[v->rule]) w->low[v->rule] = w->order[e.value];
    }
    return true;
}

static const char *walk_all(walk *w, bool strict)
{
    for (uint32_t i = 0; i < w->r->n_rules; i++) {
        if (w->order[i] == 0 && !walk_from(w, i, strict)) return left_recursive;
    }
    return NULL;
}

/* The most ways from any place within a rule: what stands behind a character may be left out as well. */
static size_t most_ways(const walk *w)
{
    size_t most = 0;
    for (size_t i = 0; i < w->r->n_rules; i++) {
        const gbnf_rule *u = &w->r->rules[i];
        size_t run = 0;
        if (w->value[i] > most) most = w->value[i];
        for (size_t k = 0; k < u->n; k++) {
            const gbnf_element e = u->items[k];
            run = e.kind == GBNF_RULE ? plus(run, w->value[e.value]) : 0;
            if (run > most) most = run;
            if (e.kind == GBNF_RULE && !w->empty[e.value]) run = 0;
        }
    }
    return most;
}

static const char *weigh(const reader *r, chat_gbnf_cost *cost)
{
    const char *fault = NULL;
    bool *empty = calloc(r->n_rules, sizeof *empty);
    walk plain = {0}, w = {0};
    /* llama.cpp's search: it takes those for empty that plainly are. */
    if (!empty || (find_plainly_empty(r, empty), !walk_new(&plain, r, empty))) {
        fault = no_memory;
        goto out;
    }
    if ((fault = walk_all(&plain, true))) goto out;
    for (size_t i = 0; i < r->n_rules; i++) {
        if (plain.value[i] > cost->visits) cost->visits = plain.value[i];
        cost->work = plus(cost->work, plain.work[i]);
    }
    /* Where a text may go on: with all that are. */
    if (!find_empty(r, empty) || !walk_new(&w, r, empty)) {
        fault = no_memory;
        goto out;
    }
    if ((fault = walk_all(&w, false))) goto out;
    cost->ways = most_ways(&w);
    if (cost->visits > MAX_VISITS || cost->work > MAX_WORK || cost->ways > MAX_WAYS)
        fault = "leaves too many ways open at once: too many rules begin with one another, or may be left out";
out:
    walk_free(&w);
    walk_free(&plain);
    free(empty);
    return fault;
}

/* ---- the whole ---- */

/* All rules one behind the other. */
static gbnf *flattened(reader *r)
{
    size_t n = 0, n_alternatives = 0;
    for (size_t i = 0; i < r->n_rules; i++) {
        n += r->rules[i].n;
        for (size_t k = 0; k < r->rules[i].n; k++) n_alternatives += gbnf_is_end(r->rules[i].items[k]);
    }
    gbnf *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->n_rules = r->n_rules;
    g->elements = malloc(n * sizeof *g->elements);
    g->first = malloc((r->n_rules + 1) * sizeof *g->first);
    g->starts = malloc(n_alternatives * sizeof *g->starts);
    if (!g->elements || !g->first || !g->starts) {
        chat_gbnf_free(g);
        return NULL;
    }
    size_t at = 0, n_starts = 0;
    for (size_t i = 0; i < r->n_rules; i++) {
        const gbnf_rule *u = &r->rules[i];
        g->first[i] = (uint32_t)n_starts;
        for (size_t k = 0; k < u->n; k++) {
            if (k == 0 || gbnf_is_end(u->items[k - 1])) g->starts[n_starts++] = (uint32_t)(at + k);
            g->elements[at + k] = u->items[k];
        }
        at += u->n;
    }
    g->first[r->n_rules] = (uint32_t)n_starts;
    g->n_elements = at;
    g->root = (uint32_t)json_integer_value(json_object_get(r->names, "root"));
    g->classes = r->classes;
    g->ranges = r->ranges;
    r->classes = NULL;
    r->ranges = NULL;
    return g;
}

const char *chat_gbnf_read(const char *text, bool exact, const struct llama_vocab *vocab, gbnf **out,
                           chat_gbnf_cost *cost)
{
    chat_gbnf_cost here = {0};
    reader r = {.at = text, .exact = exact, .vocab = vocab};
    if (out) *out = NULL;
    if (read_all(&r)) r.fault = weigh(&r, &here);
    here.bytes = r.bytes;
    if (cost) *cost = here;
    if (out && !r.fault && !(*out = flattened(&r))) r.fault = no_memory;
    reader_free(&r);
    return r.fault;
}

const char *chat_gbnf_fault(const char *text, bool exact, chat_gbnf_cost *cost)
{
    return chat_gbnf_read(text, exact, NULL, NULL, cost);
}

void chat_gbnf_free(gbnf *g)
{
    if (!g) return;
    free(g->elements);
    free(g->first);
    free(g->starts);
    free(g->classes);
    free(g->ranges);
    free(g);
}
