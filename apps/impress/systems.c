/* impress systems: the named systems as sets of switches, and the values that each switch takes. */
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "model.h"
#include "report.h"
#include "switches.h"
#include "text.h"

typedef struct systems_settings {
    const char *values;
    bool json;
} systems_settings;

static const opt options[] = {
    {"json", 0, OPT_FLAG, offsetof(systems_settings, json), NULL, "print JSON", true},
    {"values", 0, OPT_TEXT, offsetof(systems_settings, values), "SWITCH",
     "print the values of one switch, or the names of systems for\n`system`, a line each", true},
};

const opt_command systems_command = {
    "systems",
    "systems [NAME[+SWITCH=VALUE...]...] [--values SWITCH] [--json]",
    "List the systems, each a set of switches, or show what given ones are made of.",
    "order, rest and chunk belong to a store: what is written from then on. The others belong to each\n"
    "request. docs/systems.md describes them.",
    options,
    sizeof options / sizeof *options,
};

enum { N_SHOWN = SWITCH_PREFETCH + 1 };

/* Lines for completions and scripts. */
static int print_values(const char *name)
{
    if (!strcmp(name, "system")) {
        printf("recomp\n");
        for (size_t i = 0; imp_system_name(i); i++) printf("%s\n", imp_system_name(i));
        return 0;
    }
    for (size_t i = 0; switch_name(i); i++) {
        char values[200];
        if (strcmp(name, switch_name(i)) != 0) continue;
        switch_values((switch_id)i, values, sizeof values);
        if (!strchr(values, ',')) return printf("%s\n", values) < 0;
        for (char *s = strtok(values, ", "); s; s = strtok(NULL, ", ")) printf("%s\n", s);
        return 0;
    }
    return opt_misuse(&systems_command, "no switch `%s`", name);
}

static int add_head(text_table *t)
{
    bool ok = text_table_add(t, "%s", "");
    for (size_t i = 0; ok && i < N_SHOWN; i++) ok = text_table_add(t, "%s", switch_name(i));
    return ok ? 0 : app_fail("out of memory");
}

/* One system into the table or the array. */
static int show(const char *text, text_table *t, json_t *array)
{
    app_system s;
    char error[SWITCH_ERROR_BYTES], value[32];
    if (app_system_make("systems", text, NULL, 0.25, &s, error) < 0) return opt_misuse(&systems_command, "%s", error);
    json_t *o = array ? json_pack("{s:s}", "system", s.name) : NULL;
    bool ok = array ? o != NULL : text_table_add(t, "%s", s.name);
    for (size_t i = 0; ok && i < (array ? SWITCH_COUNT : N_SHOWN); i++) {
        const char *v = s.recompute ? "-" : switch_value(&s, (switch_id)i, value);
        ok = array ? json_object_set_new(o, switch_name(i), json_string(v)) == 0 : text_table_add(t, "%s", v);
    }
    if (array) ok = json_array_append_new(array, o) == 0 && ok;
    return ok ? 0 : app_fail("out of memory");
}

int cmd_systems(int argc, char **argv)
{
    systems_settings s = {0};
    int n;
    int rc = opt_parse(&systems_command, argc, argv, &s, &n);
    if (rc) return rc == 1 ? 0 : rc;
    if (s.values) return n ? opt_misuse(&systems_command, "unexpected argument `%s`", argv[1]) : print_values(s.values);

    text_table *table = s.json ? NULL : text_table_new(N_SHOWN + 1);
    json_t *array = s.json ? json_array() : NULL;
    rc = table ? add_head(table) : array ? 0 : app_fail("out of memory");
    if (n == 0) {
        if (rc == 0) rc = show("recomp", table, array);
        for (size_t i = 0; rc == 0 && imp_system_name(i); i++) rc = show(imp_system_name(i), table, array);
    }
    for (int i = 1; rc == 0 && i <= n; i++) rc = show(argv[i], table, array);
    if (rc == 0 && table) text_table_print(table, stdout);
    if (rc == 0 && array) {
        rc = report_print_json(array);
        array = NULL;
    }
    json_decref(array);
    text_table_free(table);
    return rc;
}
