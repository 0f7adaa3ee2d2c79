#include "eval.h"

#include <stdio.h>
#include <stdlib.h>

#include "model.h"
#include "report.h"

static int summarise(const eval *e, const eval_task *t, size_t variant, eval_summary *out)
{
    const eval_outcome **mine = calloc(2 * t->n, sizeof *mine);
    bool ok = mine != NULL;
    for (size_t i = 0; ok && i < t->n; i++) {
        mine[i] = eval_outcome_of(e, t, i, variant);
        mine[t->n + i] = eval_outcome_of(e, t, i, e->reference);
        ok = mine[i] && mine[t->n + i];
    }
    ok = ok && eval_summarise(mine, mine + t->n, t->n, t->norm, out);
    free(mine);
    return ok ? 0 : app_fail("out of memory");
}

/* Is there something that it does where its way to identify doesn't do? */
static bool may_fall_back(const eval_variant *v)
{
    imp_identify identify = v->request.load.switches.identify;
    return v->system.chooses && (identify == IMP_IDENTIFY_PROBE || identify == IMP_IDENTIFY_SKETCH);
}

static json_t *summary_json(const eval *e, const eval_task *t, const eval_variant *v, const eval_summary *s)
{
    json_t *fallback = may_fall_back(v) ? json_real(s->fallback) : json_null();
    return json_pack("{s:s,s:s,s:s,s:f,s:I,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:o,s:f,s:f}", "system", v->system.name, "task",
                     t->name, "model", e->model_name, "retention", v->request.load.retention, "n", (json_int_t)s->n,
                     "accuracy", s->accuracy, "diff_full", s->diff, "ci_low", s->ci_low, "ci_high", s->ci_high,
                     "agreement", s->agreement, "kl", s->kl, "mass", s->mass, "fallback_layers", fallback,
                     "identify_bytes", s->identify_bytes, "bytes_read", s->bytes_read);
}

int eval_report_json(const eval *e)
{
    json_t *all = json_array();
    int rc = 0;
    for (size_t k = 0; rc == 0 && k < e->n_tasks; k++) {
        for (size_t v = 0; rc == 0 && v < e->n_variants; v++) {
            eval_summary s;
            if (!e->variants[v].asked) continue;
            rc = summarise(e, &e->tasks[k], v, &s);
            if (rc == 0 && json_array_append_new(all, summary_json(e, &e->tasks[k], &e->variants[v], &s)) != 0)
                rc = app_fail("out of memory");
        }
    }
    if (rc == 0) return report_print_json(all);
    json_decref(all);
    return rc;
}

static int print_task(const eval *e, const eval_task *t)
{
    static const char *const heads[] = {"", "sum %", "norm %", "diff", "95 % interval", "same %", "KL", "mass",
                                        "fall %", "identify", "read"};
    char about[64];
    if (t->shots < 0) snprintf(about, sizeof about, "the document");
    else snprintf(about, sizeof about, "%lld shots", (long long)t->shots);
    printf("%s: %zu questions on %s, %zu tokens; accuracy is %s %%\n", t->name, t->n, about, t->n_shared,
           t->norm ? "norm" : "sum");
    text_table *table = text_table_new(sizeof heads / sizeof *heads);
    bool ok = table != NULL;
    int rc = 0;
    for (size_t i = 0; ok && i < sizeof heads / sizeof *heads; i++) ok = text_table_add(table, "%s", heads[i]);
    for (size_t i = 0; ok && rc == 0 && i < e->n_variants; i++) {
        const eval_variant *v = &e->variants[i];
        eval_summary s;
        char identify[32], read[32], fallback[32] = "-";
        if (!v->asked) continue;
        if ((rc = summarise(e, t, i, &s)) != 0) break;
        if (may_fall_back(v)) snprintf(fallback, sizeof fallback, "%.1f", s.fallback * 100);
        ok = v->system.chooses && !(v->request.load.mass > 0)
                 ? text_table_add(table, "%s %g %%", v->system.name, v->request.load.retention * 100)
                 : text_table_add(table, "%s", v->system.name);
        ok = ok && text_table_add(table, "%.1f", s.accuracy_sum * 100) &&
             text_table_add(table, "%.1f", s.accuracy_norm * 100) && text_table_add(table, "%+.1f", s.diff * 100) &&
             text_table_add(table, "%+.1f to %+.1f", s.ci_low * 100, s.ci_high * 100) &&
             text_table_add(table, "%.1f", s.agreement * 100) && text_table_add(table, "%.2g", s.kl) &&
             text_table_add(table, "%.3f", s.mass) && text_table_add(table, "%s", fallback) &&
             text_table_add(table, "%s", text_bytes((uint64_t)s.identify_bytes, identify)) &&
             text_table_add(table, "%s", text_bytes((uint64_t)s.bytes_read, read));
    }
    if (ok && rc == 0) text_table_print(table, stdout);
    text_table_free(table);
    return rc ? rc : ok ? 0 : app_fail("out of memory");
}

int eval_report_tables(const eval *e)
{
    int rc = 0;
    for (size_t k = 0; rc == 0 && k < e->n_tasks; k++) {
        if (k) putchar('\n');
        rc = print_task(e, &e->tasks[k]);
    }
    return rc ? rc : fflush(stdout) == 0 ? 0 : app_fail("can't write to standard output");
}
