#include "keys.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "model.h"
#include "text.h"

enum { MIN_KEY = 8 }; /* characters: what is shorter is a slip, not a secret */

typedef struct ring_key {
    char *key;
    size_t tenant; /* its number */
} ring_key;

struct key_ring {
    ring_key *keys;
    size_t n;
    key_tenant **tenants; /* each stays where it is */
    size_t n_tenants, n_nameless;
};

static void free_tenant(key_tenant *t)
{
    if (!t) return;
    free(t->salt);
    free(t->label);
    free(t);
}

/* The number of the tenant with this name (NULL: a new one), by its key. 0: no memory. */
static size_t tenant_of(key_ring *r, const char *key, const char *name)
{
    const key_tenant *known = name ? key_ring_named(r, name) : NULL;
    if (known) return known->number;
    key_tenant **tenants = realloc(r->tenants, (r->n_tenants + 1) * sizeof *tenants);
    if (!tenants) return 0;
    r->tenants = tenants;
    key_tenant *t = calloc(1, sizeof *t);
    /* A name can't be taken for a key that has none: the salts differ by their first letter. No name begins with #. */
    size_t n = strlen(name ? name : key) + 6, room = (name ? strlen(name) : 0) + 24;
    if (t) t->salt = malloc(n);
    if (t) t->label = malloc(room);
    if (!t || !t->salt || !t->label) {
        free_tenant(t);
        return 0;
    }
    snprintf(t->salt, n, "%s:%s", name ? "name" : "key", name ? name : key);
    if (name) snprintf(t->label, room, "%s", name);
    else snprintf(t->label, room, "#%zu", ++r->n_nameless);
    tenants[r->n_tenants++] = t;
    t->number = (unsigned)r->n_tenants;
    return r->n_tenants;
}

/* A name is shown to the admin, as a label of metrics, which are UTF-8. */
static bool is_name(const char *name)
{
    size_t n = strlen(name);
    return text_utf8(name, n) == n;
}

static int add(key_ring *r, const char *key, const char *name, const char *where)
{
    if (strlen(key) < MIN_KEY) return app_fail("%s: a key of fewer than %d characters", where, MIN_KEY);
    if (name && !is_name(name)) return app_fail("%s: a name that isn't UTF-8", where);
    for (size_t i = 0; i < r->n; i++)
        if (!strcmp(r->keys[i].key, key)) return app_fail("%s: a key that is there already", where);
    ring_key *keys = realloc(r->keys, (r->n + 1) * sizeof *keys);
    if (!keys) return app_fail("out of memory");
    r->keys = keys;
    size_t tenant = tenant_of(r, key, name);
    char *copy = tenant ? strdup(key) : NULL;
    if (!copy) return app_fail("out of memory");
    keys[r->n++] = (ring_key){copy, tenant};
    return 0;
}

static int add_file(key_ring *r, const char *path)
{
    FILE *f = fopen(path, "r");
    if (!f) return app_fail("can't read the keys in %s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(fileno(f), &st) == 0 && (st.st_mode & 077))
        fprintf(stderr, "impress: note: others may read the keys in %s (chmod 600 ends that)\n", path);
    char line[1024], where[512];
    int rc = 0;
    for (int at = 1; rc == 0 && fgets(line, sizeof line, f); at++) {
        char *rest = NULL;
        snprintf(where, sizeof where, "%s, line %d", path, at);
        if (!strchr(line, '\n') && !feof(f)) {
            rc = app_fail("%s: too long", where);
            break;
        }
        static const char mark[] = "\xef\xbb\xbf"; /* of UTF-8: some editors put it before everything */
        size_t n_mark = sizeof mark - 1;
        if (at == 1 && strncmp(line, mark, n_mark) == 0) memmove(line, line + n_mark, strlen(line + n_mark) + 1);
        for (char *hash = line; (hash = strchr(hash, '#')) != NULL; hash++)
            if (hash == line || hash[-1] == ' ' || hash[-1] == '\t') *hash = '\0';
        char *key = strtok_r(line, " \t\r\n", &rest);
        char *name = key ? strtok_r(NULL, " \t\r\n", &rest) : NULL;
        if (name && strtok_r(NULL, " \t\r\n", &rest))
            rc = app_fail("%s: more than a key and a name", where);
        else if (key)
            rc = add(r, key, name, where);
    }
    if (rc == 0 && ferror(f)) rc = app_fail("can't read the keys in %s: %s", path, strerror(errno));
    fclose(f);
    memset(line, 0, sizeof line);
    if (rc == 0 && r->n == 0) rc = app_fail("%s holds no keys", path);
    return rc;
}

int key_ring_open(const char *path, const char *inline_keys, key_ring **out)
{
    *out = NULL;
    key_ring *r = calloc(1, sizeof *r);
    int rc = r ? 0 : app_fail("out of memory");
    if (rc == 0 && path) rc = add_file(r, path);
    if (rc == 0 && inline_keys) {
        char *copy = strdup(inline_keys), *rest = NULL;
        if (!copy) rc = app_fail("out of memory");
        for (char *k = copy ? strtok_r(copy, ", ", &rest) : NULL; rc == 0 && k; k = strtok_r(NULL, ", ", &rest))
            rc = add(r, k, NULL, "the environment");
        if (rc == 0 && r->n == 0) rc = app_fail("the environment's keys are empty");
        free(copy);
    }
    if (rc) {
        key_ring_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

void key_ring_close(key_ring *r)
{
    if (!r) return;
    for (size_t i = 0; i < r->n; i++) free(r->keys[i].key);
    for (size_t i = 0; i < r->n_tenants; i++) free_tenant(r->tenants[i]);
    free(r->keys);
    free(r->tenants);
    free(r);
}

size_t key_ring_size(const key_ring *r) { return r ? r->n : 0; }

/* Every byte of the stored key is looked at, whatever was sent. */
static bool equal(const char *stored, const char *sent)
{
    size_t n = strlen(stored), m = strlen(sent);
    volatile unsigned char differ = n != m;
    for (size_t i = 0; i < n; i++) differ |= (unsigned char)(stored[i] ^ sent[i < m ? i : m]);
    return differ == 0;
}

const key_tenant *key_ring_find(const key_ring *r, const char *key)
{
    size_t found = 0;
    for (size_t i = 0; i < key_ring_size(r); i++)
        if (equal(r->keys[i].key, key)) found = r->keys[i].tenant;
    return key_ring_tenant(r, found);
}

size_t key_ring_n_tenants(const key_ring *r) { return r ? r->n_tenants : 0; }

const key_tenant *key_ring_tenant(const key_ring *r, size_t number)
{
    return number > 0 && number <= key_ring_n_tenants(r) ? r->tenants[number - 1] : NULL;
}

const key_tenant *key_ring_named(const key_ring *r, const char *name)
{
    for (size_t i = 1; i <= key_ring_n_tenants(r); i++) {
        const key_tenant *t = key_ring_tenant(r, i);
        if (!strncmp(t->salt, "name:", 5) && !strcmp(t->label, name)) return t;
    }
    return NULL;
}
