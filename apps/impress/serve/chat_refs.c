/* chat_refs.c: what llama.cpp makes of a `$ref`, and what it can't.
 *
 * It follows a pointer into the schema, but not `#`, the schema itself. That gets a place in `$defs` here, as a copy
 * without the definitions: the root stays as it is, since a template's parser may look for its properties.
 *
 * What a `$ref` leads to becomes a rule whose name is the pointer's, signs left out, and all schemas of a request share
 * one grammar: where two tools each define an `Item`, the one's would be taken for the other's. Where that is so, the
 * later one's definitions get other names.
 *
 * And it follows them by a recursion, without an end where a `$ref` leads to nothing but itself, and where one that an
 * `allOf` holds leads back to that `allOf`: no rule is made for it there, its target's properties are copied in. An
 * `allOf` of a `$ref` alone, as pydantic writes it, becomes that `$ref`. */
#include "chat_refs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat_keywords.h"

enum {
    MAX_ENTRIES = 1 << 20,   /* looked at, of what all `$ref`s of a request lead to */
    MAX_WAYS = 1 << 16,      /* through its unions */
    MAX_LEVELS = 2000,       /* one inside the other if all are followed: some 2 kB of stack each */
    MAX_BYTES = 256 << 10,   /* of what gets other names */
    PART_BYTES = 16,         /* that a schema's place in another one adds to its rule's name */
    LABEL_BYTES = 40,
    NAME_BYTES = LABEL_BYTES + 32, /* of `#/$defs/LABELNUMBER` */
};

static const char no_memory[] = "the server is out of memory", too_much[] = "what its `$ref`s lead to is too much",
                  too_deep[] = "its `$ref`s lead too deep";

typedef struct ref {
    char *text;
    json_t *target; /* NULL: there is none, which llama.cpp tells if it comes there */
    size_t chain;   /* number of the search that came by */
    bool open;      /* it is on the way that is looked at */
    bool followed;  /* a rule is made for it: it isn't just copied into an `allOf` */
    bool copied;    /* into one that is looked at */
} ref;

/* Of one schema. */
typedef struct refs {
    json_t *schema, *numbers; /* from a `$ref`'s text to its number */
    ref *items;
    json_t **holders; /* objects that have a `$ref` */
    size_t n, room, n_holders, holders_room;
    size_t depth, copying; /* of the walk; of what is copied in it */
    bool copies; /* it goes on through that */
    chat_refs *all;
    json_t *rules; /* as the request's */
    const char *fault;
} refs;

static bool fails(refs *r, const char *fault)
{
    if (!r->fault) r->fault = fault;
    return false;
}

static void *grown(refs *r, void *items, size_t n, size_t *room, size_t bytes)
{
    if (n < *room) return items;
    size_t more = 2 * *room + 16;
    void *out = realloc(items, more * bytes);
    if (out) *room = more;
    else fails(r, no_memory);
    return out;
}

/* ---- found ---- */

static bool is_root(const char *text) { return strcmp(text, "#") == 0 || *text == '\0'; }

/* As llama.cpp goes: escapes as they are, indices as strtoull() reads them. NULL: nowhere, or no memory. */
static json_t *resolve(json_t *schema, const char *text)
{
    if (is_root(text)) return schema;
    if (strncmp(text, "#/", 2) != 0) return NULL;
    char *path = strdup(text + 2), *s = path;
    json_t *at = path ? schema : NULL;
    while (s && at) {
        char *end, *name = strsep(&s, "/");
        if (json_is_array(at)) {
            unsigned long long index = strtoull(name, &end, 10);
            at = end == name ? NULL : json_array_get(at, index);
        } else {
            at = json_object_get(at, name);
        }
    }
    free(path);
    return at;
}

static const char *ref_of(const json_t *v) { return json_string_value(json_object_get(v, "$ref")); }

static bool note(refs *r, json_t *holder, const char *text)
{
    json_t **holders = grown(r, r->holders, r->n_holders, &r->holders_room, sizeof *holders);
    if (!holders) return false;
    r->holders = holders;
    r->holders[r->n_holders++] = holder;
    if (json_object_get(r->numbers, text)) return true;
    ref *items = grown(r, r->items, r->n, &r->room, sizeof *items);
    if (!items) return false;
    r->items = items;
    r->items[r->n] = (ref){.text = strdup(text), .target = resolve(r->schema, text)};
    if (!r->items[r->n].text) return fails(r, no_memory);
    r->n++;
    return json_object_set_new(r->numbers, text, json_integer((json_int_t)r->n - 1)) == 0 || fails(r, no_memory);
}

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

static size_t walk(refs *r, json_t *v, size_t path);

/* All members of an object or array. */
static size_t walk_members(refs *r, json_t *v, size_t path)
{
    const char *key;
    json_t *item;
    size_t i, levels = 0;
    json_object_foreach(v, key, item) levels = most(levels, walk(r, item, path + strlen(key) + 1));
    json_array_foreach(v, i, item) levels = most(levels, walk(r, item, path));
    return levels;
}

/* llama.cpp builds the schema once for each of its types, and what is inside it: a power of their number. Of more types
 * than there are one is named twice, or is none. */
static bool names_twice(const json_t *types)
{
    json_t *one, *other;
    size_t i, k;
    if (json_array_size(types) > 7) return true;
    json_array_foreach((json_t *)types, i, one) {
        if (json_string_length(one) == 0) return true; /* as if there was none: another one that looks at `allOf` */
        json_array_foreach((json_t *)types, k, other) {
            if (k < i && json_equal(one, other)) return true;
        }
    }
    return false;
}

/* How often llama.cpp builds a schema's `allOf`: for each of its types that it looks at that for. */
static size_t times_all_of(const json_t *v)
{
    json_t *type;
    size_t i, n = 0;
    json_array_foreach(json_object_get(v, "type"), i, type) {
        const char *name = json_string_value(type);
        n += name && (strcmp(name, "object") == 0 || strcmp(name, "string") == 0);
    }
    return most(n, 1);
}

static bool has_properties(const json_t *v)
{
    const json_t *more = json_object_get(v, "additionalProperties");
    return json_object_get(v, "properties") || (more && !json_is_true(more));
}

/* What llama.cpp looks at before a type, and before `allOf`. */
static bool has_other_kind(const json_t *v)
{
    static const char *const first[] = {"$ref", "oneOf", "anyOf", "const", "enum"};
    for (size_t i = 0; i < sizeof first / sizeof first[0]; i++)
        if (json_object_get(v, first[i])) return true;
    return false;
}

/* Whether llama.cpp takes a schema for its `allOf`, for one of its types at least. */
static bool is_all_of(const json_t *v)
{
    if (!json_object_get(v, "allOf") || has_other_kind(v)) return false;
    const json_t *type = json_object_get(v, "type"), *one;
    size_t i;
    if (!type || json_is_null(type) || (json_is_string(type) && json_string_length(type) == 0))
        return !has_properties(v);
    bool object = false, string = false;
    for (i = 0; (one = json_is_array(type) ? json_array_get(type, i) : i == 0 ? type : NULL); i++) {
        const char *name = json_string_value(one);
        object |= name && strcmp(name, "object") == 0;
        string |= name && strcmp(name, "string") == 0;
    }
    return string || (object && !has_properties(v));
}

size_t chat_refs_optional(const json_t *v)
{
    const json_t *properties = json_object_get(v, "properties");
    json_t *item, *names = json_object();
    size_t i, n = json_object_size(properties);
    json_array_foreach(json_object_get(v, "required"), i, item) {
        const char *name = json_string_value(item);
        if (!names || !name || json_object_get(names, name) || !json_object_get(properties, name)) continue;
        json_object_set_nocheck(names, name, item);
        n--;
    }
    json_decref(names);
    return n;
}

/* The rules that are named after one schema, as far as they aren't named after the schemas in it. `path`: bytes. */
static void count_names(refs *r, const json_t *v, size_t path)
{
    const char *key, *pattern = json_string_value(json_object_get(v, "pattern"));
    json_t *properties = json_object_get(v, "properties"), *item;
    if (!json_is_object(v)) return;
    double n = (double)path * (1 + (double)json_array_size(json_object_get(v, "type")));
    double optional = properties ? (double)chat_refs_optional(v) : 0;
    /* All rules are copied for it, and each repetition is one. */
    if (pattern) n += r->all->bytes / 8;
    for (; pattern && *pattern; pattern++) n += *pattern == '{' ? (double)path : 0;
    /* One for the pair, and the rest behind each that may be left out, anew for each of these. */
    json_object_foreach(properties, key, item) {
        n += (1 + optional / 2) * (double)(path + strlen(key));
        r->all->bytes += 3.0 * (double)(path + strlen(key));
    }
    if (r->copying > 0) r->all->optional_work += optional * optional * optional;
    r->all->letters += n;
}

/* The properties that a member of an `allOf` brings in by a `$ref`. */
static size_t walk_copied(refs *r, const json_t *member, size_t path, double *optional)
{
    const char *text = ref_of(member);
    const json_t *number = text ? json_object_get(r->numbers, text) : NULL;
    if (++r->all->entries > MAX_ENTRIES) fails(r, too_much);
    if (!number || r->fault) return 0;
    const size_t i = (size_t)json_integer_value(number);
    json_t *target = r->items[i].target;
    if (r->items[i].copied) fails(r, "what a `$ref` in an `allOf` leads to holds that `allOf`");
    if (!target || r->fault) return 0;
    size_t levels = 0;
    r->items[i].copied = true;
    if (ref_of(target)) {
        if (note(r, target, ref_of(target))) levels = walk_copied(r, target, path, optional);
    } else if (!has_other_kind(target)) {
        json_t *properties = json_object_get(target, "properties");
        if (optional) *optional += (double)json_object_size(properties);
        count_names(r, target, path);
        r->copying++;
        levels = walk_members(r, properties, path);
        r->copying--;
    }
    r->items[i].copied = false; /* the items may lie elsewhere by now */
    return levels;
}

static size_t walk_all_of(refs *r, json_t *members, size_t path)
{
    static const char *const unions[] = {"oneOf", "anyOf"};
    json_t *member, *part;
    size_t i, k, levels = 0;
    double optional = 0;
    json_array_foreach(members, i, member) {
        if (ref_of(member)) {
            if (!note(r, member, ref_of(member))) return 0;
            levels = most(levels, 1);
        } else {
            levels = most(levels, walk(r, member, path + PART_BYTES));
        }
        if (!r->copies) continue;
        levels = most(levels, walk_copied(r, member, path, NULL));
        for (size_t u = 0; u < 2 && !ref_of(member); u++)
            json_array_foreach(json_object_get(member, unions[u]), k, part)
                levels = most(levels, walk_copied(r, part, path, &optional));
    }
    r->all->optional_work += optional * optional * optional;
    r->all->letters += optional * optional / 2 * (double)path;
    return levels;
}

static bool follow(refs *r, json_t *holder, const char *text)
{
    if (!note(r, holder, text)) return false;
    r->items[json_integer_value(json_object_get(r->numbers, text))].followed = true;
    return true;
}

/* All `$ref`s of a schema. `path`: bytes of names from the root. Returns the levels down to the deepest one, 0: there
 * is none. */
static size_t walk(refs *r, json_t *v, size_t path)
{
    const char *key, *text = ref_of(v);
    json_t *item;
    size_t entries = 1 + json_object_size(v) + json_array_size(v), levels = 0;
    if ((r->all->entries += entries) > MAX_ENTRIES) fails(r, too_much);
    if (!r->fault && names_twice(json_object_get(v, "type"))) fails(r, "a `type` is named twice, or unknown");
    if (r->depth > MAX_LEVELS) fails(r, too_deep);
    if (r->fault || (text && !follow(r, v, text))) return 0;
    if (r->copies) count_names(r, v, path);
    r->depth++;
    json_object_foreach(v, key, item) {
        if (chat_listed(chat_keywords_data, key)) continue;
        if (r->copies && (strcmp(key, "$defs") == 0 || strcmp(key, "definitions") == 0)) continue;
        bool all_of = strcmp(key, "allOf") == 0, several = chat_listed(chat_keywords_maps, key) || json_is_array(item);
        size_t inner_path = strcmp(key, "properties") == 0 ? path : path + PART_BYTES;
        for (size_t times = all_of ? times_all_of(v) : 1; times > 0; times--) {
            size_t inner = all_of && is_all_of(v) ? walk_all_of(r, item, path)
                           : several              ? walk_members(r, item, inner_path)
                                                  : walk(r, item, inner_path);
            if (inner > 0) levels = most(levels, inner + several);
        }
    }
    r->depth--;
    return text || levels > 0 ? levels + 1 : 0;
}

/* Some templates' parsers ask which types a property can have, and go all ways through its unions for that that don't
 * come to the same place twice. */
static void open_unions(refs *r, const json_t *v)
{
    static const char *const unions[] = {"anyOf", "oneOf", "allOf"};
    if (r->fault) return;
    if (++r->all->ways > MAX_WAYS) fails(r, "there are too many ways through its unions");
    const char *text = ref_of(v);
    if (text) {
        ref *at = &r->items[json_integer_value(json_object_get(r->numbers, text))];
        if (!at->target || at->open) return;
        at->open = true;
        open_unions(r, at->target);
        at->open = false;
        return;
    }
    for (size_t k = 0; k < 3; k++) {
        json_t *part;
        size_t i;
        for (size_t times = k == 2 ? times_all_of(v) : 1; times > 0; times--)
            json_array_foreach(json_object_get(v, unions[k]), i, part) open_unions(r, part);
    }
}

/* What llama.cpp would take for ever for, or more stack than there is. */
static void check(refs *r)
{
    size_t levels = 0;
    walk(r, r->schema, 0);
    for (size_t i = 0; i < r->n && !r->fault; i++) {
        if (r->items[i].target) levels += walk(r, r->items[i].target, strlen(r->items[i].text));
        if (levels > MAX_LEVELS) fails(r, too_deep);
    }
    /* Once more, as they become rules: what is copied is one with what it is copied into. */
    r->copies = true;
    levels = walk(r, r->schema, 0);
    for (size_t i = 0; i < r->n && !r->fault; i++) {
        if (levels > MAX_LEVELS) fails(r, too_deep);
        if (r->items[i].target && r->items[i].followed)
            levels += walk(r, r->items[i].target, strlen(r->items[i].text));
    }
    if (levels > MAX_LEVELS) fails(r, too_deep);
    for (size_t i = 0; i < r->n && !r->fault; i++) {
        const char *next = r->items[i].text;
        while (next) {
            ref *at = &r->items[json_integer_value(json_object_get(r->numbers, next))];
            if (at->chain == i + 1) fails(r, "a `$ref` leads to nothing but itself");
            if (at->chain) break;
            at->chain = i + 1;
            next = at->target ? ref_of(at->target) : NULL;
        }
    }
    const char *name;
    json_t *property;
    json_object_foreach(json_object_get(r->schema, "properties"), name, property) open_unions(r, property);
}

/* ---- an `allOf` of nothing but a `$ref` ---- */

static bool has_only(const json_t *v, const char *key, const char *const *remarks)
{
    const char *name;
    json_t *item;
    json_object_foreach((json_t *)v, name, item) {
        if (strcmp(name, key) != 0 && !chat_listed(remarks, name)) return false;
    }
    return true;
}

bool chat_refs_unwrap(json_t *v)
{
    const char *key, *name;
    json_t *item, *inner, *all_of = json_object_get(v, "allOf"), *member = json_array_get(all_of, 0);
    size_t i;
    bool changed = false;
    if (json_array_size(all_of) == 1 && ref_of(member) && has_only(v, "allOf", chat_keywords_remarks) &&
        has_only(member, "$ref", chat_keywords_remarks + CHAT_KEYWORDS_OF_PLACE) &&
        json_object_update_missing(v, member) == 0)
        changed = json_object_del(v, "allOf") == 0;
    json_object_foreach(v, key, item) {
        if (chat_listed(chat_keywords_data, key)) continue;
        if (chat_listed(chat_keywords_maps, key)) {
            json_object_foreach(item, name, inner) changed |= chat_refs_unwrap(inner);
        } else {
            changed |= chat_refs_unwrap(item);
        }
        json_array_foreach(item, i, inner) changed |= chat_refs_unwrap(inner);
    }
    return changed;
}

/* ---- named ---- */

/* That of the rule which a `$ref` becomes. NULL: no memory. */
static char *rule_of(const char *text)
{
    const char *s = strchr(text, '#');
    char *out = malloc(strlen(text) + 1), *to = out;
    bool left_out = false;
    for (s = s ? s + 1 : text; out && *s; s++) {
        bool kept = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || (*s >= '0' && *s <= '9') || *s == '-';
        if (kept) *to++ = *s;
        else if (!left_out) *to++ = '-';
        left_out = !kept;
    }
    if (out) *to = '\0';
    return out;
}

/* Enter a `$ref` that llama.cpp follows. False: no memory, or the rule is another one's already, of all schemas. */
static bool enter(refs *r, const ref *item)
{
    char *rule = rule_of(item->text);
    if (!rule) return fails(r, no_memory);
    const json_t *mine = json_object_get(r->rules, rule), *other = json_object_get(r->all->rules, rule);
    bool is_other = (mine && !json_equal(mine, item->target)) || (other && !json_equal(other, item->target));
    if (!mine && !is_other && json_object_set(r->rules, rule, item->target) != 0) fails(r, no_memory);
    free(rule);
    return !is_other && !r->fault;
}

/* A name in `defs` that is nobody's yet, like `label` if it can be. */
static bool find_name(refs *r, const json_t *defs, const char *label, char text[NAME_BYTES])
{
    char plain[LABEL_BYTES + 1];
    size_t n = 0;
    for (; label[n] && n < LABEL_BYTES; n++) {
        bool kept = (label[n] >= 'a' && label[n] <= 'z') || (label[n] >= 'A' && label[n] <= 'Z') ||
                    (label[n] >= '0' && label[n] <= '9');
        plain[n] = kept ? label[n] : '-';
    }
    plain[n] = '\0';
    snprintf(text, NAME_BYTES, "#/$defs/%s", plain);
    for (;;) {
        char *rule = rule_of(text);
        if (!rule) return fails(r, no_memory);
        bool taken = json_object_get(r->rules, rule) || json_object_get(r->all->rules, rule) ||
                     json_object_get(r->numbers, text) || json_object_get(defs, strrchr(text, '/') + 1);
        free(rule);
        if (!taken) return true;
        /* Without a sign before it: with one it would be named as what is inside `label`. */
        snprintf(text, NAME_BYTES, "#/$defs/%s%zu", plain, ++r->all->n_names + 1);
    }
}

/* Have what led to items[i] lead to `text`. */
static bool rename_ref(refs *r, size_t i, const char *text)
{
    char *own = strdup(text);
    if (!own) return fails(r, no_memory);
    free(r->items[i].text);
    r->items[i].text = own;
    return true;
}

/* Write the items' texts into the objects. */
static bool rewrite(refs *r)
{
    for (size_t i = 0; i < r->n_holders; i++) {
        const json_t *number = json_object_get(r->numbers, ref_of(r->holders[i]));
        if (!number) continue; /* one that is there twice: done */
        const char *text = r->items[json_integer_value(number)].text;
        if (json_object_set_new(r->holders[i], "$ref", json_string(text)) != 0) return fails(r, no_memory);
    }
    json_object_clear(r->numbers);
    for (size_t i = 0; i < r->n; i++) {
        if (json_object_set_new(r->numbers, r->items[i].text, json_integer((json_int_t)i)) != 0)
            return fails(r, no_memory);
    }
    return true;
}

/* The root gets a place among its own definitions. */
static bool place_root(refs *r)
{
    char text[NAME_BYTES];
    if (!json_object_get(r->schema, "$defs")) json_object_set_new(r->schema, "$defs", json_object());
    json_t *defs = json_object_get(r->schema, "$defs");
    if (!defs) return fails(r, no_memory);
    if (!json_is_object(defs)) return fails(r, "`$defs` isn't an object");
    if (!find_name(r, defs, "root", text)) return false;
    for (size_t i = 0; i < r->n; i++) {
        if (is_root(r->items[i].text) && !rename_ref(r, i, text)) return false;
    }
    if (!rewrite(r)) return false;
    /* What is inside is one with what is inside the root: both are to stay the same. */
    json_t *copy = json_copy(r->schema);
    if (!copy || json_object_set_new(defs, strrchr(text, '/') + 1, copy) != 0) return fails(r, no_memory);
    json_object_del(copy, "$defs");
    json_object_del(copy, "definitions");
    for (size_t i = 0; i < r->n; i++) {
        if (r->items[i].target == r->schema) r->items[i].target = copy;
    }
    return !ref_of(copy) || note(r, copy, ref_of(copy));
}

/* All that is referred to gets a name of its own, and no other definitions are left. */
static bool rename_all(refs *r)
{
    json_t *defs = json_object();
    size_t bytes = 0;
    bool ok = defs && json_object_clear(r->rules) == 0;
    for (size_t i = 0; ok && i < r->n; i++) {
        ref *item = &r->items[i];
        char text[NAME_BYTES];
        if (!item->target) continue;
        bytes += json_dumpb(item->target, NULL, 0, JSON_COMPACT | JSON_ENCODE_ANY);
        ok = bytes <= MAX_BYTES || fails(r, too_much);
        ok = ok && find_name(r, defs, strrchr(item->text, '/') + 1, text) && rename_ref(r, i, text);
        if (ok && json_object_set(defs, strrchr(text, '/') + 1, item->target) != 0) ok = fails(r, no_memory);
    }
    ok = ok && rewrite(r);
    json_object_del(r->schema, "definitions");
    if (json_object_set_new(r->schema, "$defs", defs) != 0) ok = fails(r, no_memory);
    for (size_t i = 0; ok && i < r->n; i++) {
        if (r->items[i].target) ok = enter(r, &r->items[i]);
    }
    return ok;
}

/* What is built besides the definitions, each of which is built once. */
static void find_again(refs *r)
{
    static const char *const own[] = {"#/$defs/", "#/definitions/"};
    for (size_t i = 0; i < r->n; i++) {
        const ref *item = &r->items[i];
        bool defined = false;
        for (size_t k = 0; k < 2; k++) {
            size_t n = strlen(own[k]);
            defined |= strncmp(item->text, own[k], n) == 0 && !strchr(item->text + n, '/');
        }
        if (!defined && item->target && json_array_append(r->all->again, item->target) != 0) fails(r, no_memory);
    }
}

static void settle(refs *r, bool *rewritten)
{
    check(r);
    bool root = false, clash = false;
    for (size_t i = 0; i < r->n && !r->fault; i++) {
        if (is_root(r->items[i].text)) root = true;
        else if (r->items[i].target) clash |= !enter(r, &r->items[i]);
    }
    if (r->fault || (root && !place_root(r))) return;
    for (size_t i = 0; i < r->n && root && !r->fault; i++) {
        if (r->items[i].target) clash |= !enter(r, &r->items[i]);
    }
    if (r->fault || (clash && !rename_all(r))) return;
    find_again(r);
    if (json_object_update(r->all->rules, r->rules) != 0) fails(r, no_memory);
    *rewritten = root || clash;
}

int chat_refs_settle(chat_refs *all, json_t *schema, const char *param, bool *rewritten, oai_error *e)
{
    refs r = {.schema = schema, .all = all, .numbers = json_object(), .rules = json_object()};
    if (!all->rules) all->rules = json_object();
    json_decref(all->again);
    all->again = json_array();
    *rewritten = false;
    if (r.numbers && r.rules && all->rules && all->again) settle(&r, rewritten);
    else fails(&r, no_memory);
    for (size_t i = 0; i < r.n; i++) free(r.items[i].text);
    free(r.items);
    free(r.holders);
    json_decref(r.numbers);
    json_decref(r.rules);
    if (!r.fault) return 0;
    if (r.fault == no_memory) return oai_fail(e, 500, NULL, NULL, "%s", no_memory);
    return oai_fail(e, 400, "invalid_schema", param, "the JSON schema: %s", r.fault);
}

void chat_refs_free(chat_refs *all)
{
    json_decref(all->rules);
    json_decref(all->again);
}
