/* chat_answer.c: the answer's text as it comes, told apart into content, reasoning and tool calls.
 *
 * A parser is given all of the text so far again and again, since llama.cpp's can't go on from where it was. To keep
 * that from becoming quadratic, it is asked again when the text has grown by a part of its length. What was told once
 * stays told: what a later parse says is told as far as it goes on from there.
 *
 * Its parser takes stack for each level of JSON, some 2 kB. So brackets that may be nested too deeply are hidden from
 * it: as JSON such a text has no form that is known, while in strings, reasoning and plain text they stay what they
 * are. */
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "chat_ways.h"

enum {
    GROWTH = 128,     /* parse again when 1/128 more is there */
    MAX_NESTED = 500, /* of brackets; those in strings count too */
};

/* For brackets that are hidden: U+1FFFE and U+1FFFF, which are no characters. One byte after these tells which. */
static const char hidden[] = "\xf0\x9f\xbf";
enum { HIDDEN_BYTES = 4, HIDDEN_ARRAY = 0xbe, HIDDEN_OBJECT = 0xbf };

typedef struct call {
    char *id, *name;
    oai_buffer arguments;
} call;

/* A piece by its place: texts still move while pieces are collected. */
typedef struct place {
    oai_piece_kind kind;
    size_t from, n, index;
    bool begins; /* a tool call */
} place;

struct chat_answer {
    const chat_plan *p;
    oai_buffer text;    /* for the parser: all that came, of whole characters; deep brackets are hidden */
    size_t nested;      /* brackets that are open at its end, at most */
    bool hides;
    char cut[4];        /* the beginning of one */
    size_t n_cut;
    size_t n_parsed;    /* bytes of the text that were parsed last */
    oai_buffer content, reasoning; /* what was told */
    call *calls;
    size_t n_calls, calls_room;
    bool enough;        /* what comes from now on isn't told */
    place *places;
    size_t n_places, places_room;
    oai_piece *pieces;
    size_t pieces_room;
};

chat_answer *chat_answer_new(const chat_plan *p)
{
    chat_answer *a = calloc(1, sizeof *a);
    if (a) a->p = p;
    return a;
}

void chat_answer_free(chat_answer *a)
{
    if (!a) return;
    for (size_t i = 0; i < a->n_calls; i++) {
        free(a->calls[i].id);
        free(a->calls[i].name);
        oai_buffer_free(&a->calls[i].arguments);
    }
    free(a->calls);
    oai_buffer_free(&a->text);
    oai_buffer_free(&a->content);
    oai_buffer_free(&a->reasoning);
    free(a->places);
    free(a->pieces);
    free(a);
}

bool chat_answer_enough(const chat_answer *a) { return a->enough; }

bool chat_answer_calls(const chat_answer *a)
{
    const oai_buffer *last = a->n_calls ? &a->calls[a->n_calls - 1].arguments : NULL;
    json_t *v = last && last->data ? json_loadb(last->data, last->n, 0, NULL) : NULL;
    json_decref(v);
    return v != NULL;
}

/* ---- telling ---- */

static bool add_place(chat_answer *a, place p)
{
    if (a->n_places == a->places_room) {
        size_t room = 2 * a->places_room + 8;
        place *grown = realloc(a->places, room * sizeof *grown);
        if (!grown) return false;
        a->places = grown;
        a->places_room = room;
    }
    a->places[a->n_places++] = p;
    return true;
}

/* Tell the first n bytes of `text`, as far as they are more than `told`, and go on from there. */
static bool tell(chat_answer *a, oai_buffer *told, oai_piece_kind kind, size_t index, bool begins, const char *text,
                 size_t n)
{
    size_t from = told->n;
    bool more = n > from && (from == 0 || memcmp(text, told->data, from) == 0);
    if (!more && !begins) return true;
    if (more) oai_buffer_add(told, text + from, n - from);
    return !told->failed && add_place(a, (place){kind, from, told->n - from, index, begins});
}

static call *add_call(chat_answer *a, const chat_call *from)
{
    if (a->n_calls == a->calls_room) {
        size_t room = 2 * a->calls_room + 4;
        call *grown = realloc(a->calls, room * sizeof *grown);
        if (!grown) return NULL;
        a->calls = grown;
        a->calls_room = room;
    }
    call *c = &a->calls[a->n_calls];
    memset(c, 0, sizeof *c);
    char id[5 + 24 + 1] = "call_";
    if (from->id[0] == '\0' && !chat_random_digits(id + 5, 12)) return NULL;
    c->id = strdup(from->id[0] ? from->id : id);
    c->name = strdup(from->name);
    if (!c->id || !c->name) {
        free(c->id);
        free(c->name);
        return NULL;
    }
    a->n_calls++;
    return c;
}

/* Without the blanks at the end: they may turn out to belong to the form. */
static size_t sure_length(const char *text)
{
    size_t n = strlen(text);
    while (n > 0 && strchr(" \n\r\t", text[n - 1])) n--;
    return n;
}

/* Bring hidden brackets back, in place. Returns the length. */
static size_t reveal(char *text)
{
    char *to = text, *from = text, *at;
    while ((at = strstr(from, hidden))) {
        unsigned char which = (unsigned char)at[HIDDEN_BYTES - 1];
        bool is_one = which == HIDDEN_ARRAY || which == HIDDEN_OBJECT;
        size_t n = (size_t)(at - from) + (is_one ? 0 : HIDDEN_BYTES - 1);
        memmove(to, from, n);
        to += n;
        from += n;
        if (!is_one) continue;
        *to++ = which == HIDDEN_ARRAY ? '[' : '{';
        from += HIDDEN_BYTES;
    }
    size_t n = strlen(from);
    memmove(to, from, n + 1);
    return (size_t)(to - text) + n;
}

static bool tell_parsed(chat_answer *a, const chat_parsed *m, bool end)
{
    if (a->hides) {
        reveal(m->reasoning);
        reveal(m->content);
        for (size_t i = 0; i < m->n_calls; i++) reveal(m->calls[i].arguments);
    }
    size_t n_reasoning = sure_length(m->reasoning);
    size_t n_content = end && m->n_calls == 0 ? strlen(m->content) : sure_length(m->content);
    if (!tell(a, &a->reasoning, OAI_PIECE_REASONING, 0, false, m->reasoning, n_reasoning)) return false;
    if (!tell(a, &a->content, OAI_PIECE_TEXT, 0, false, m->content, n_content)) return false;
    for (size_t i = 0; i < m->n_calls; i++) {
        const chat_call *c = &m->calls[i];
        bool begins = i >= a->n_calls;
        if (i > 0 && a->p->one_call) {
            a->enough = true;
            break;
        }
        /* While a call's name comes, it may still grow. */
        if (begins && (c->name[0] == '\0' || (c->arguments[0] == '\0' && i + 1 == m->n_calls && !end))) break;
        if (begins && !add_call(a, c)) return false;
        size_t n = strlen(c->arguments);
        if (!tell(a, &a->calls[i].arguments, OAI_PIECE_TOOL_CALL, i, begins, c->arguments, n)) return false;
    }
    return true;
}

/* ---- taking in ---- */

/* Add bytes of whole characters; NUL has no place in a C text. */
static void add_whole(oai_buffer *b, const char *bytes, size_t n)
{
    while (n > 0) {
        const char *nul = memchr(bytes, '\0', n);
        size_t part = nul ? (size_t)(nul - bytes) : n;
        oai_buffer_add(b, bytes, part);
        if (!nul) break;
        oai_buffer_add(b, "\xef\xbf\xbd", 3);
        bytes += part + 1;
        n -= part + 1;
    }
}

/* The same for the parser. */
static void add_for_parser(chat_answer *a, const char *bytes, size_t n)
{
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        bool opens = bytes[i] == '[' || bytes[i] == '{';
        if ((bytes[i] == ']' || bytes[i] == '}') && a->nested > 0) a->nested--;
        if (!opens || ++a->nested <= MAX_NESTED) continue;
        const char mark = (char)(bytes[i] == '[' ? HIDDEN_ARRAY : HIDDEN_OBJECT);
        a->hides = true;
        add_whole(&a->text, bytes + from, i - from);
        oai_buffer_add(&a->text, hidden, HIDDEN_BYTES - 1);
        oai_buffer_add(&a->text, &mark, 1);
        from = i + 1;
    }
    add_whole(&a->text, bytes + from, n - from);
}

static bool take(chat_answer *a, oai_buffer *to, const char *bytes, size_t n, bool end)
{
    oai_buffer joined = {0};
    if (a->n_cut > 0) {
        oai_buffer_add(&joined, a->cut, a->n_cut);
        oai_buffer_add(&joined, bytes, n);
        bytes = joined.data;
        n = joined.n;
    }
    bool ok = !joined.failed;
    if (ok && n > 0) {
        size_t whole = end ? n : oai_utf8_whole(bytes, n);
        if (to == &a->text) add_for_parser(a, bytes, whole);
        else add_whole(to, bytes, whole);
        a->n_cut = n - whole;
        memcpy(a->cut, bytes + whole, a->n_cut);
        ok = !to->failed;
    }
    oai_buffer_free(&joined);
    return ok;
}

/* Parse what is there, and tell what is new. */
static bool parse(chat_answer *a, chat_end end)
{
    const chat_way *way = a->p->way;
    const void *parser = a->p->r.parser;
    const char *text = a->text.n ? a->text.data : "";
    chat_parsed m = {0};
    int rc = way->parse(parser, text, !end, &m);
    const bool fits = rc == 0; /* as a whole, or the beginning of one */
    if (!fits && end) {
        /* What there is of it. */
        chat_parsed_free(&m);
        rc = way->parse(parser, text, true, &m);
    }
    bool ok = true;
    if (rc == 0) {
        ok = tell_parsed(a, &m, end);
        /* Nothing at all came of a text, and it wasn't cut on the way to something: then it is told as it is. */
        bool nothing = a->content.n == 0 && a->reasoning.n == 0 && a->n_calls == 0;
        if (ok && end && nothing && (end == CHAT_ENDED || !fits)) rc = -1;
        /* JSON up to a hidden bracket. */
        if (ok && end && a->hides && !fits) rc = -1;
    }
    if (ok && rc != 0 && end && a->n_calls == 0 && a->reasoning.n == 0) {
        char *all = strdup(text);
        ok = all && tell(a, &a->content, OAI_PIECE_TEXT, 0, false, all, a->hides ? reveal(all) : a->text.n);
        free(all);
    }
    chat_parsed_free(&m);
    a->n_parsed = a->text.n;
    return ok;
}

static int hand_out(chat_answer *a, const oai_piece **pieces, size_t *n_pieces)
{
    if (a->n_places > a->pieces_room) {
        oai_piece *grown = realloc(a->pieces, a->n_places * sizeof *grown);
        if (!grown) return -1;
        a->pieces = grown;
        a->pieces_room = a->n_places;
    }
    for (size_t i = 0; i < a->n_places; i++) {
        const place *at = &a->places[i];
        const oai_buffer *b = at->kind == OAI_PIECE_TEXT ? &a->content : &a->reasoning;
        if (at->kind == OAI_PIECE_TOOL_CALL) b = &a->calls[at->index].arguments;
        a->pieces[i] = (oai_piece){
            .kind = at->kind,
            .text = b->data ? b->data + at->from : "",
            .n_bytes = at->n,
            .index = at->index,
            .id = at->begins ? a->calls[at->index].id : NULL,
            .name = at->begins ? a->calls[at->index].name : NULL,
        };
    }
    *pieces = a->pieces;
    *n_pieces = a->n_places;
    return 0;
}

int chat_answer_add(chat_answer *a, const char *bytes, size_t n, chat_end end, const oai_piece **pieces,
                    size_t *n_pieces)
{
    *pieces = NULL;
    *n_pieces = 0;
    a->n_places = 0;
    size_t told = a->content.n;
    bool parsed = a->p->r.parser != NULL;
    if (!take(a, parsed ? &a->text : &a->content, bytes, n, end)) return -1;
    if (!parsed) {
        size_t more = a->content.n - told;
        if (more > 0 && !add_place(a, (place){OAI_PIECE_TEXT, told, more, 0, false})) return -1;
    } else if (end || a->text.n - a->n_parsed > a->n_parsed / GROWTH) {
        if (!parse(a, end)) return -1;
    }
    return hand_out(a, pieces, n_pieces);
}

int chat_answer_whole(chat_answer *a, const oai_piece **pieces, size_t *n_pieces)
{
    a->n_places = 0;
    *pieces = NULL;
    *n_pieces = 0;
    if (a->reasoning.n > 0 && !add_place(a, (place){OAI_PIECE_REASONING, 0, a->reasoning.n, 0, false})) return -1;
    if (a->content.n > 0 && !add_place(a, (place){OAI_PIECE_TEXT, 0, a->content.n, 0, false})) return -1;
    for (size_t i = 0; i < a->n_calls; i++) {
        if (!add_place(a, (place){OAI_PIECE_TOOL_CALL, 0, a->calls[i].arguments.n, i, true})) return -1;
    }
    return hand_out(a, pieces, n_pieces);
}
