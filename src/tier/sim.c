/* sim.c: the policy of the tiers, driven as they drive it, without bytes (impress.h). */
#include "base/alloc.h"
#include "base/status.h"
#include "cache/cache.h"

/* What a use moves isn't asked for, but a use may move no more than in the tiers. */
enum { MAX_MOVED = 256 };

struct imp_sim {
    imp_policy *policy;
    uint64_t keys[MAX_MOVED];
};

int imp_sim_new(imp_cache policy, uint64_t host_bytes, uint64_t device_bytes, imp_sim **out)
{
    if (!out) return imp_fail(IMP_E_ARG, "imp_sim_new: no room for the result");
    *out = NULL;
    if (policy < IMP_CACHE_NONE || policy >= IMP_CACHE_OF_STORE)
        return imp_fail(IMP_E_ARG, "imp_sim_new: cache policy %d isn't known", (int)policy);
    imp_sim *s = imp_malloc(sizeof *s);
    if (!s) return imp_fail(IMP_E_NOMEM, "imp_sim_new: no memory");
    int rc = imp_policy_new(policy, device_bytes, host_bytes, &s->policy);
    if (rc < 0) {
        imp_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void imp_sim_free(imp_sim *sim)
{
    if (!sim) return;
    imp_policy_free(sim->policy);
    imp_free(sim);
}

static int number(imp_level level) { return level == IMP_LEVEL_DEVICE ? 2 : level == IMP_LEVEL_HOST ? 1 : 0; }

int imp_sim_where(const imp_sim *sim, uint64_t key) { return sim ? number(imp_policy_where(sim->policy, key)) : 0; }

int imp_sim_use(imp_sim *sim, uint64_t key, uint64_t n_bytes, double share)
{
    if (!sim) return imp_fail(IMP_E_ARG, "imp_sim_use: no simulation");
    imp_moved moved = {.keys = sim->keys, .max = MAX_MOVED};
    imp_level before = imp_policy_where(sim->policy, key);
    imp_policy_use(sim->policy, key, (float)share);
    if (before == IMP_LEVEL_NONE) (void)imp_policy_admit(sim->policy, key, n_bytes, &moved);
    else if (before == IMP_LEVEL_HOST) (void)imp_policy_promote(sim->policy, key, &moved);
    return number(before);
}
