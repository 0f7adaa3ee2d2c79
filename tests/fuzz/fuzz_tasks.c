/* fuzz_tasks.c: any bytes as a file of questions. */
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "tasks.h"

static void check(const task_file *f)
{
    MUST(f->n > 0);
    for (size_t i = 0; i < f->n; i++) {
        const task_example *e = &f->items[i];
        MUST(e->id && e->query && e->line > (i ? f->items[i - 1].line : 0));
        MUST(e->n_choices >= 2 && e->n_choices <= TASK_MAX_CHOICES && e->answer < e->n_choices);
        for (size_t k = 0; k < e->n_choices; k++) MUST(e->choices[k] && e->choices[k][0] != '\0');
        for (size_t k = 0; k < i; k++) MUST(strcmp(e->id, f->items[k].id) != 0);
    }
    char *shots = task_shots(f, f->n);
    MUST(shots && strstr(shots, f->items[f->n - 1].query));
    free(shots);
    MUST(task_leak(f, f->n, f, f->n) == &f->items[0]);
    MUST(task_leak(f, 0, f, f->n) == NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    const char *path = fuzz_file(bytes, n_bytes), *const docs[] = {NULL, "d"};
    size_t n_all = 0;
    for (int i = 0; i < 2; i++) {
        task_file f;
        char error[TASK_ERROR_BYTES] = "";
        int rc = task_file_read(path, docs[i], &f, error);
        MUST(rc == 0 || (rc == -1 && f.n == 0 && !f.items && error[0] != '\0' && !strchr(error, '\n')));
        if (i == 0) n_all = f.n;
        if (i == 0 && rc != 0) return 0;
        MUST(f.n <= n_all); /* a document's questions are some of all */
        if (rc == 0) check(&f);
        task_file_free(&f);
    }
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const char *const texts[] = {
        "{\"id\":\"1\",\"query\":\"Q\",\"choices\":[\"a\",\"b\"],\"answer\":1}\n\n"
        "{\"id\":\"2\",\"query\":\"R\",\"choices\":[\"a\",\"b\",\"c\"],\"answer\":0,\"doc\":\"d\"}\n",
        "{\"id\":\"1\",\"query\":\"\xc3\xa9\\u0041\",\"choices\":[\"a\",\"\"],\"answer\":1,\"doc\":\"d\"}",
        "{\"id\":\"1\",\"query\":\"Q\",\"choices\":[\"a\",\"b\"],\"answer\":2}\r\n",
        "{\"id\":\"1\",\"id\":\"2\",\"query\":\"Q\",\"choices\":[],\"answer\":-1}",
        " \t\r\n\n",
        "{\"id\":1,\"query\":null,\"choices\":{},\"answer\":\"0\"}\n[]\n",
        "{\"id\":\"x\",\"query\":\"Q\",\"choices\":[\"a\",\"b\"],\"answer\":0,\"doc\":7}\n"
        "{\"id\":\"x\",\"query\":\"Q\",\"choices\":[\"a\",\"b\"],\"answer\":0}\n",
    };
    return fuzz_text_seed(texts, sizeof texts / sizeof *texts, i, out, room);
}
