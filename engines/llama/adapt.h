/* adapt.h: is it quicker to compute a prefix, to load all of it, or a part? Pure: times in, an answer out. It knows
 * nothing of llama.cpp. */
#ifndef IMPRESS_LLAMA_ADAPT_H
#define IMPRESS_LLAMA_ADAPT_H

#include <stdbool.h>
#include <stddef.h>

/* Operations that a model takes. */
typedef struct lc_ops {
    double weights;  /* a token */
    double attention; /* a token and cell that it attends to */
    double slower;   /* times as many for attention where less than LC_TILE tokens are computed at once */
} lc_ops;

#define LC_TILE 64

/* For `n` tokens at once, the first of which attends to `cells` cells, its own included, the others to one more each. */
double lc_ops_of(const lc_ops *ops, size_t n, size_t cells);

/* How long an operation takes, in ns: moving averages, as many tokens at once and cells make it differ. */
#define LC_SPEEDS 8
typedef struct lc_speed {
    double ns[2][LC_SPEEDS]; /* [LC_TILE tokens and more][by cells: below 256, 512, 1024, ...]; 0: not known */
    bool guessed[2][LC_SPEEDS];
} lc_speed;

/* `n` tokens took `ns`. A guess counts only until there is something better. */
void lc_speed_note(lc_speed *s, const lc_ops *ops, size_t n, size_t cells, double ns, bool guess);
/* What `n` tokens will take, by what is nearest to them; negative: nothing is known. At most `batch` at once. */
double lc_speed_expect(const lc_speed *s, const lc_ops *ops, size_t n, size_t cells, size_t batch);

/* Times that are expected of each way, none below 0; HUGE_VAL: it can't be had. */
typedef struct lc_times {
    double computed, whole, partial;
} lc_times;

/* A way that loses nothing is taken where it costs at most so many times what the quickest does. */
#define LC_FREE 1.05

typedef enum lc_choice { LC_COMPUTE, LC_WHOLE, LC_PARTIAL } lc_choice;

/* Never slower than LC_FREE times the better of `computed` and `whole`. Of those two the quicker, `whole` if neither
 * is; a part only where that is the quickest by more than LC_FREE. */
lc_choice lc_choose(const lc_times *t);

#endif
