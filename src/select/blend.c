/* blend.c: moving averages of scores, and scores blended with them. */
#include "select/blend.h"

#include <math.h>

#include "select/half.h"
#include "select/kernels.h"

#define F16_MAX 65504.0f

/* The score as a number from 0 on. */
static float usable(float x) { return x > 0.0f && isfinite(x) ? x : 0.0f; }

void imp_normalise(const float *scores, size_t n, float *out)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) sum += (double)usable(scores[i]);
    double gain = sum > 0.0 ? (double)n / sum : 0.0;
    for (size_t i = 0; i < n; i++) out[i] = (float)((double)usable(scores[i]) * gain);
}

float imp_history_weight(uint32_t n_before)
{
    return 1.0f / (float)(n_before < IMP_HISTORY_SPAN ? n_before + 1 : IMP_HISTORY_SPAN);
}

void imp_history_update(float *history, const float *scores, size_t n, float weight)
{
    for (size_t i = 0; i < n; i++) history[i] += weight * (usable(scores[i]) - history[i]);
}

imp_blend imp_blend_default(void) { return (imp_blend){IMP_BLEND_SUM, 0.5f}; }

void imp_blend_scores(imp_blend blend, const float *scores, const float *history, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        float score = usable(scores[i]), past = history ? blend.weight * usable(history[i]) : 0.0f;
        float larger = score > past ? score : past;
        out[i] = blend.rule == IMP_BLEND_SUM ? score + past : larger;
    }
}

void imp_history_encode(const float *history, size_t n, void *out)
{
    unsigned char *p = out;
    for (size_t i = 0; i < n; i++) {
        float x = usable(history[i]);
        uint16_t h = imp_f16_of_f32(x < F16_MAX ? x : F16_MAX);
        p[2 * i] = (unsigned char)h;
        p[2 * i + 1] = (unsigned char)(h >> 8);
    }
}

void imp_history_decode(const void *in, size_t n, float *history)
{
    const unsigned char *p = in;
    for (size_t i = 0; i < n; i++) history[i] = usable(imp_f32_of_f16((uint16_t)(p[2 * i] | p[2 * i + 1] << 8)));
}
