/* ropes.h: tables of cosines and sines, made once for a store and shared by its loads. Most models turn all layers
 * alike, so there is one table for each way of turning, from position 0 on, which is made anew when a longer prefix
 * comes.
 */
#ifndef IMP_SESSION_ROPES_H
#define IMP_SESSION_ROPES_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "select/rope.h"

typedef struct imp_ropes imp_ropes;
typedef struct imp_ropes_entry imp_ropes_entry;

int imp_ropes_new(imp_ropes **out);
void imp_ropes_free(imp_ropes *r); /* nothing may be taken; NULL is allowed */

/* A table for positions [0, n) at least, until it is given back. Several threads may use one. IMP_E_ARG: `rope` can't
 * be; IMP_E_NOMEM. */
int imp_ropes_take(imp_ropes *r, const imp_rope *rope, uint32_t head_dim, size_t n, imp_ropes_entry **out);
void imp_ropes_give(imp_ropes *r, imp_ropes_entry *entry); /* NULL is allowed */
const imp_rope_table *imp_ropes_table(const imp_ropes_entry *entry);

#endif
