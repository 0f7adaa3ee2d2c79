/* Opens a store in the folder given, and reads its figures back. Compiles as C11 and as C++11. */
#include <impress/impress.h>

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc != 2) return 2;

    char header_version[32];
    snprintf(header_version, sizeof header_version, "%d.%d.%d", IMP_VERSION_MAJOR, IMP_VERSION_MINOR, IMP_VERSION_PATCH);
    if (strcmp(header_version, imp_version()) != 0) {
        fprintf(stderr, "header %s, library %s\n", header_version, imp_version());
        return 1;
    }

    imp_store_opts opts;
    imp_store_opts_init(&opts);
    opts.limit_bytes = 64u << 20;
    imp_store *store = NULL;
    imp_stats stats;
    if (imp_store_open(argv[1], &opts, &store) < 0 || imp_store_stats(store, &stats) < 0) {
        fprintf(stderr, "%s\n", imp_last_error());
        imp_store_close(store);
        return 1;
    }
    printf("impress %s: %llu nodes, reads by %s\n", imp_version(), (unsigned long long)stats.n_nodes, stats.io_mode);
    imp_store_close(store);
    return 0;
}
