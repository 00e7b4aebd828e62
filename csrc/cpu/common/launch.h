// How every pass over the data is started: the only place with threads and the only place that opens profiler ranges.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "../../common/range.h"
#include "../../kda.h"

namespace kda::cpu {

// Threads of a launch: what torch.set_num_threads() says where torch's OpenMP runtime is the one that was loaded first.
inline int64_t thread_count() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Calls body(block, head) for every block and head, on all threads, inside a range called `name`. Every call must write
// its own memory only: then the result does not depend on how many threads there are. The body must not throw.
template <class Body>
void launch(const char* name, const KdaArgs& args, int64_t blocks, int64_t heads, const Body& body) {
  const Range range(args, name);
#pragma omp parallel for collapse(2) schedule(dynamic) if (blocks * heads > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t head = 0; head < heads; ++head) body(block, head);
  }
}

}  // namespace kda::cpu
