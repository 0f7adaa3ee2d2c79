/* lru.c: least recently used; the order is a list, newest first. */
#include "cache/policy.h"

static imp_entry_list *list_of(imp_policy *p, uint32_t e) { return &p->tiers[p->entries[e].level].list; }

static void lru_enter(imp_policy *p, uint32_t e) { imp_entry_list_first(p, list_of(p, e), e); }

static void lru_leave(imp_policy *p, uint32_t e) { imp_entry_list_take(p, list_of(p, e), e); }

static void lru_restore(imp_policy *p, uint32_t e) { imp_entry_list_last(p, list_of(p, e), e); }

static void lru_used(imp_policy *p, uint32_t e)
{
    lru_leave(p, e);
    lru_enter(p, e);
}

static uint32_t lru_worst(const imp_policy *p, imp_level level) { return p->tiers[level].list.tail; }

const imp_policy_ops imp_policy_lru = {
    .enter = lru_enter, .leave = lru_leave, .restore = lru_restore, .used = lru_used, .worst = lru_worst};
