/* lru.c: least recently used; the order is a list, newest first. */
#include "cache/policy.h"

static void lru_enter(imp_policy *p, uint32_t e) { imp_entry_list_first(p, &p->order, e); }

static void lru_leave(imp_policy *p, uint32_t e) { imp_entry_list_take(p, &p->order, e); }

static void lru_restore(imp_policy *p, uint32_t e) { imp_entry_list_last(p, &p->order, e); }

static void lru_used(imp_policy *p, uint32_t e)
{
    imp_entry_list_take(p, &p->order, e);
    imp_entry_list_first(p, &p->order, e);
}

static uint32_t lru_worst(const imp_policy *p) { return p->order.tail; }

const imp_policy_ops imp_policy_lru = {
    .enter = lru_enter, .leave = lru_leave, .restore = lru_restore, .used = lru_used, .worst = lru_worst};
