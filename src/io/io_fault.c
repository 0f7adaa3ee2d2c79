#include "io/io_fault.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RULES = 16, N_KINDS = IMP_IO_LIST + 1 };

atomic_bool imp_io_fault_on;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static pthread_cond_t cleared = PTHREAD_COND_INITIALIZER;
static uint64_t n_cleared;
static struct {
    imp_io_fault fault;
    uint64_t seen, hits;
} rules[MAX_RULES];
static int n_rules;
static unsigned denied;
static imp_io_event *events;
static size_t n_events, events_capacity;
static uint64_t counts[N_KINDS];

static const char *const kind_names[N_KINDS] = {"all", "open", "read", "write", "fsync", "rename", "unlink", "list"};

const char *imp_io_kind_name(imp_io_kind kind)
{
    return (unsigned)kind < N_KINDS ? kind_names[kind] : "?";
}

static void switch_on(void) { atomic_store_explicit(&imp_io_fault_on, true, memory_order_relaxed); }

int imp_io_fault_add(const imp_io_fault *fault)
{
    pthread_mutex_lock(&lock);
    int rule = -1;
    if (n_rules < MAX_RULES) {
        rule = n_rules++;
        rules[rule].fault = *fault;
        rules[rule].seen = rules[rule].hits = 0;
        switch_on();
    }
    pthread_mutex_unlock(&lock);
    return rule;
}

static const struct {
    const char *name;
    int err;
} errnos[] = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EACCES", EACCES}, {"EPERM", EPERM},
              {"EROFS", EROFS},   {"ENOENT", ENOENT}, {"EINTR", EINTR},   {"EAGAIN", EAGAIN}, {"ENOMEM", ENOMEM},
              {"EMFILE", EMFILE}, {"EINVAL", EINVAL}, {"ELOOP", ELOOP},   {"EEXIST", EEXIST}, {"ENODEV", ENODEV}};

static const struct {
    const char *name;
    imp_io_action action;
    bool has_value;
} actions[] = {{"errno", IMP_IO_ERRNO, true}, {"short", IMP_IO_SHORT, true}, {"flip", IMP_IO_FLIP, true},
               {"exit", IMP_IO_EXIT, true},   {"kill", IMP_IO_KILL, false},  {"delay", IMP_IO_DELAY, true},
               {"hang", IMP_IO_HANG, true},   {"hold", IMP_IO_HOLD, false}};

static bool parse_number(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    if (text[0] < '0' || text[0] > '9') return false;
    *out = strtoull(text, &end, 10);
    return errno == 0 && *end == '\0';
}

static bool parse_what(const char *what, const char *value, imp_io_fault *f)
{
    for (size_t i = 0; i < sizeof errnos / sizeof errnos[0]; i++) {
        if (strcasecmp(what, errnos[i].name) == 0) {
            f->action = IMP_IO_ERRNO;
            f->value = (uint64_t)errnos[i].err;
            return value == NULL;
        }
    }
    for (size_t i = 0; i < sizeof actions / sizeof actions[0]; i++) {
        if (strcasecmp(what, actions[i].name) == 0) {
            f->action = actions[i].action;
            if (!actions[i].has_value) return value == NULL;
            return value != NULL && parse_number(value, &f->value);
        }
    }
    return false;
}

int imp_io_fault_parse(const char *text)
{
    char copy[128];
    if (strlen(text) >= sizeof copy) return -1;
    strcpy(copy, text);

    char *parts[4] = {NULL, NULL, NULL, NULL}, *save = NULL;
    int n = 0;
    for (char *p = strtok_r(copy, ":", &save); p; p = strtok_r(NULL, ":", &save)) {
        if (n == 4) return -1;
        parts[n++] = p;
    }
    if (n < 3) return -1;

    imp_io_fault f = {0};
    int kind = 0;
    while (kind < N_KINDS && strcmp(parts[0], kind_names[kind]) != 0) kind++;
    if (kind == N_KINDS) return -1;
    f.kind = (imp_io_kind)kind;
    size_t length = strlen(parts[1]);
    if (parts[1][length - 1] == '+') {
        f.stay = true;
        parts[1][length - 1] = '\0';
    }
    if (!parse_number(parts[1], &f.nth) || f.nth == 0) return -1;
    if (!parse_what(parts[2], parts[3], &f)) return -1;
    return imp_io_fault_add(&f);
}

uint64_t imp_io_fault_hits(int rule)
{
    pthread_mutex_lock(&lock);
    uint64_t hits = rule >= 0 && rule < n_rules ? rules[rule].hits : 0;
    pthread_mutex_unlock(&lock);
    return hits;
}

void imp_io_fault_clear(void)
{
    pthread_mutex_lock(&lock);
    n_rules = 0;
    denied = 0;
    free(events);
    events = NULL;
    n_events = events_capacity = 0;
    memset(counts, 0, sizeof counts);
    atomic_store_explicit(&imp_io_fault_on, false, memory_order_relaxed);
    n_cleared++;
    pthread_cond_broadcast(&cleared);
    pthread_mutex_unlock(&lock);
}

void imp_io_fault_deny(unsigned what)
{
    pthread_mutex_lock(&lock);
    denied = what;
    if (what) switch_on();
    pthread_mutex_unlock(&lock);
}

bool imp_io_fault_denied(unsigned what)
{
    pthread_mutex_lock(&lock);
    bool yes = (denied & what) != 0;
    pthread_mutex_unlock(&lock);
    return yes;
}

int imp_io_fault_log_start(size_t capacity)
{
    pthread_mutex_lock(&lock);
    free(events);
    events = calloc(capacity ? capacity : 1, sizeof *events);
    events_capacity = events ? capacity : 0;
    n_events = 0;
    memset(counts, 0, sizeof counts);
    int rc = events ? 0 : -1;
    if (rc == 0) switch_on();
    pthread_mutex_unlock(&lock);
    return rc;
}

const imp_io_event *imp_io_fault_log(size_t *n)
{
    pthread_mutex_lock(&lock);
    const imp_io_event *result = events;
    *n = n_events;
    pthread_mutex_unlock(&lock);
    return result;
}

uint64_t imp_io_fault_count(imp_io_kind kind)
{
    pthread_mutex_lock(&lock);
    uint64_t n = (unsigned)kind < N_KINDS ? counts[kind] : 0;
    pthread_mutex_unlock(&lock);
    return n;
}

static bool rule_acts(int i, imp_io_kind kind, const char *name)
{
    const imp_io_fault *f = &rules[i].fault;
    if (f->kind != IMP_IO_ALL && f->kind != kind) return false;
    if (f->name && !strstr(name, f->name)) return false;
    uint64_t seen = ++rules[i].seen;
    if (seen != f->nth && !(f->stay && seen > f->nth)) return false;
    rules[i].hits++;
    return true;
}

static void record(imp_io_kind kind, const char *name, uint64_t offset, size_t n_bytes, int err)
{
    counts[kind]++;
    counts[IMP_IO_ALL]++;
    if (n_events < events_capacity) {
        imp_io_event *e = &events[n_events];
        e->kind = kind;
        e->offset = offset;
        e->n_bytes = n_bytes;
        e->err = err;
        size_t length = strnlen(name, sizeof e->name - 1);
        memcpy(e->name, name, length);
        e->name[length] = '\0';
    }
    n_events++;
}

imp_io_verdict imp_io_fault_check(imp_io_kind kind, const char *name, uint64_t offset, size_t n_bytes)
{
    imp_io_verdict v = {.err = 0, .max_bytes = SIZE_MAX, .flip_bit = -1};
    uint64_t delay_ns = 0;
    bool hold = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_rules; i++) {
        if (!rule_acts(i, kind, name)) continue;
        uint64_t value = rules[i].fault.value;
        switch (rules[i].fault.action) {
        case IMP_IO_ERRNO:
            if (v.err == 0) v.err = (int)value;
            break;
        case IMP_IO_SHORT:
            if (value < v.max_bytes) v.max_bytes = (size_t)value;
            break;
        case IMP_IO_FLIP: v.flip_bit = (int64_t)(value & INT64_MAX); break;
        case IMP_IO_EXIT: _exit((int)value);
        case IMP_IO_KILL: kill(getpid(), SIGKILL); break;
        case IMP_IO_DELAY: delay_ns += value; break;
        case IMP_IO_HANG: v.hang_ns += value; break;
        case IMP_IO_HOLD: hold = true; break;
        }
    }
    record(kind, name, offset, n_bytes, v.err);
    for (uint64_t was = n_cleared; hold && n_cleared == was;) pthread_cond_wait(&cleared, &lock);
    pthread_mutex_unlock(&lock);
    if (delay_ns) {
        struct timespec t = {.tv_sec = (time_t)(delay_ns / 1000000000u), .tv_nsec = (long)(delay_ns % 1000000000u)};
        nanosleep(&t, NULL);
    }
    return v;
}

#ifdef IMPRESS_FAULT_ENV
/* Only in builds made for tests (-DIMPRESS_FAULT_ENV): faults in a whole program, rules separated by spaces. */
__attribute__((constructor)) static void read_environment(void)
{
    const char *text = getenv("IMPRESS_IO_FAULT");
    char copy[1024], *save = NULL;
    if (!text || strlen(text) >= sizeof copy) return;
    strcpy(copy, text);
    for (char *p = strtok_r(copy, " ", &save); p; p = strtok_r(NULL, " ", &save)) {
        if (imp_io_fault_parse(p) < 0) _exit(99);
    }
}
#endif
