/* The C ABI of kda_lab: everything Python knows about the compiled code.
 *
 * Two shared libraries export these same functions: kda_cpu (always built) and kda_cuda (built where a CUDA compiler
 * is found). No torch and no Python header is needed on either side; Python loads them with ctypes, so an edited kernel
 * can be rebuilt and reloaded inside a running notebook.
 *
 * The operator (Kimi Delta Attention, forward). One sequence n, one head h; S is [V, K]; all logs are natural:
 *     q^ = q / sqrt(|q|^2 + 1e-6)            k^ = k / sqrt(|k|^2 + 1e-6)
 *     g_t = lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias))      beta_t = sigmoid(beta_t)
 *     S  <- S * diag(exp(g_t))               decay, per key channel
 *     S  <- S + beta_t (v_t - S k^_t) k^_t^T delta rule on the decayed state
 *     o_t = scale * S q^_t
 */
#ifndef KDA_H
#define KDA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define KDA_EXPORT __declspec(dllexport)
#else
#define KDA_EXPORT __attribute__((visibility("default")))
#endif

/* Raised by one whenever KdaArgs, KdaStep or a function below changes. */
#define KDA_ABI_VERSION 3

typedef enum KdaStatus {
  KDA_OK = 0,
  KDA_INVALID_ARGUMENT = 1, /* a size, pointer or limit is wrong; kda_last_error() names it */
  KDA_UNSUPPORTED = 2,      /* right, but this step or this device cannot do it */
  KDA_DEVICE_ERROR = 3,     /* a CUDA call or launch failed */
  KDA_OUT_OF_MEMORY = 4,
  KDA_INTERNAL_ERROR = 5
} KdaStatus;

typedef enum KdaDtype { KDA_NONE = 0, KDA_BF16 = 1, KDA_F32 = 2, KDA_I32 = 3, KDA_I64 = 4 } KdaDtype;

enum { KDA_DEVICE_CPU = 1, KDA_DEVICE_CUDA = 2 };

/* One forward pass. Every tensor is contiguous in the order written; the last index is the fastest. Tensors begin at
 * multiples of 16 bytes; beta, A_log and cu_seqlens may begin at multiples of their element's size. */
typedef struct KdaArgs {
  int64_t struct_bytes; /* sizeof(KdaArgs) of the caller: refused when it is not the library's own */

  int64_t B;     /* batch rows; 1 with cu_seqlens */
  int64_t T;     /* tokens of a batch row; of all packed sequences together with cu_seqlens */
  int64_t H;     /* heads */
  int64_t K;     /* key size of a head */
  int64_t V;     /* value size of a head */
  int64_t N;     /* sequences: B, or the length of cu_seqlens minus 1 */
  int64_t chunk; /* tokens of a chunk */

  double scale;       /* multiplies q^ */
  double lower_bound; /* the log-decay of one token lies in (lower_bound, 0) */

  const void* q;        /* [B, T, H, K] bf16 */
  const void* k;        /* [B, T, H, K] bf16 */
  const void* v;        /* [B, T, H, V] bf16 */
  const void* g;        /* [B, T, H, K] bf16, before the gate's activation */
  const void* beta;     /* [B, T, H] bf16, logits */
  const float* A_log;   /* [H] fp32 */
  const float* dt_bias; /* [H, K] fp32 */
  void* out;            /* [B, T, H, V] bf16 */

  const void* initial_state;   /* [N, H, V, K], or NULL for zeros; may be final_state itself */
  void* final_state;           /* [N, H, V, K], or NULL */
  const void* cu_seqlens;      /* [N + 1] on the tensors' device, or NULL; read clamped to [0, T] */
  int32_t initial_state_dtype; /* KDA_BF16, KDA_F32; KDA_NONE when NULL */
  int32_t final_state_dtype;
  int32_t cu_seqlens_dtype; /* KDA_I32, KDA_I64; KDA_NONE when NULL */

  int32_t device;  /* CUDA device index; ignored by kda_cpu */
  int32_t precise; /* not 0: keys are written to the state with more than bf16's 8 bits; see kda_lab.fwd */
  void* stream;    /* cudaStream_t; ignored by kda_cpu */
  void* workspace; /* kda_workspace_bytes() bytes on the tensors' device, 256-byte aligned; need not be zeroed */
  int64_t workspace_bytes;

  /* Called on the host around each stage (kda_cpu) or launch (kda_cuda) while a profiler listens; NULL otherwise. */
  void (*push_range)(const char* name);
  void (*pop_range)(void);
} KdaArgs;

/* One rung of the ladder; the strings live as long as the library. */
typedef struct KdaStep {
  int32_t number;
  int32_t devices; /* KDA_DEVICE_CPU | KDA_DEVICE_CUDA: where the step exists at all */
  int32_t chunks;  /* bit mask of the chunk sizes this library runs (8 | 16 | 32 | 64); 0: the step has no chunks */
  int32_t compute_capability; /* the only one it runs on, 90 for 9.0; 0: any the library is built for */
  double exponent_budget; /* largest |lower_bound| * chunk that this library's step can represent; 0: no such limit */
  const char* slug;
  const char* title;
  const char* idea;
} KdaStep;

KDA_EXPORT int32_t kda_abi_version(void);
KDA_EXPORT const KdaStep* kda_steps(int32_t* count);

/* Bytes of workspace that kda_forward needs for these sizes; reads no pointer. The negated KdaStatus
 * and an error text on sizes that the step does not run. */
KDA_EXPORT int64_t kda_workspace_bytes(int32_t step, const KdaArgs* args);

/* Runs one step. CUDA: enqueues on args->stream and returns; allocates nothing and never synchronises. */
KDA_EXPORT KdaStatus kda_forward(int32_t step, const KdaArgs* args);

/* What went wrong in this thread's last failed call. Never NULL. */
KDA_EXPORT const char* kda_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
