// A loop over chunks of work that the threads of a pool may help with.

#ifndef TIDE_PARALLEL_H_
#define TIDE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>

namespace tide {

// Run work(chunk) for every chunk in [0, chunks). The caller works from the start and waits only for
// chunks that a helper has begun: a task that the pool never gets to is never waited for, so a
// caller that itself is a thread of a busy pool cannot lock up. `Pool` has num_threads() and
// Schedule(callable), which takes a temporary.
template <typename Pool, typename Work>
void ParallelFor(Pool& pool, int64_t chunks, const Work& work) {
  const int64_t helpers = chunks < 2 ? 0 : std::min<int64_t>(chunks, pool.num_threads()) - 1;
  if (helpers < 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) work(chunk);
    return;
  }
  struct Progress {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  // Shared: a late helper looks at it after the caller has left, and then touches nothing else.
  auto progress = std::make_shared<Progress>();
  auto take = [progress, chunks, &work] {
    for (;;) {
      const int64_t chunk = progress->next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks) return;
      work(chunk);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(take)>(take));
  take();
  while (progress->done.load(std::memory_order_acquire) < chunks) std::this_thread::yield();
}

}  // namespace tide

#endif  // TIDE_PARALLEL_H_
