/* Measurements of one exponential, exported by kda_cuda beside kda.h. Used by kda_lab/microbench.py.
 *
 * Both functions enqueue on `stream` of `device` and return; they allocate nothing and never synchronise. Errors are
 * reported as in kda.h: a status, and kda_last_error().
 */
#ifndef KDA_EXP_H
#define KDA_EXP_H

#include "../kda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KDA_EXP_THREADS = 1024,    /* of a block: more than half of what an SM can hold, so an SM takes one block */
  KDA_EXP_PER_ITERATION = 32 /* exponentials of a thread */
};

/* The forms' names, in the order of their numbers; the strings live as long as the library. */
KDA_EXPORT const char* const* kda_exp_forms(int32_t* count);
KDA_EXPORT const char* const* kda_gate_forms(int32_t* count);

/* Exponentials on registers only. Every one of `blocks` blocks computes
 * iterations * KDA_EXP_THREADS * KDA_EXP_PER_ITERATION of them and writes how many clocks of its SM that took. */
KDA_EXPORT KdaStatus kda_exp_throughput(int32_t form, int32_t device, void* stream, int32_t blocks, int32_t iterations,
                                        int64_t* clocks, /* [blocks] on the device */
                                        float* results); /* [blocks, KDA_EXP_THREADS] on the device: their use */

/* The gate stage alone, on the tensors g, A_log and dt_bias of args (B, T, H, K, lower_bound, device, stream are read,
 * no other member is). g_cumsum [B, T, H, K] fp32: the gate summed within chunks of 16 tokens, in the form's log base.
 */
KDA_EXPORT KdaStatus kda_gate(int32_t form, const KdaArgs* args, float* g_cumsum);

#ifdef __cplusplus
}
#endif
#endif
