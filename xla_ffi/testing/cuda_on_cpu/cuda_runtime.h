// Runs CUDA kernels on a CPU, for tests: found in place of the toolkit's header by a C++ compiler.
//
// Every CUDA thread is a fiber with its own stack. A fiber runs until it meets a barrier, a shuffle
// or a cluster barrier, and goes on when all that must meet it have come; if none can go on, that
// is a divergent barrier, and the process ends with a message. Fibers are resumed in an order that
// the test chooses (forward, backward or shuffled), and under ThreadSanitizer each is a thread of
// its own that only barriers order: two accesses to shared or global memory that no barrier
// separates are reported as a race, whatever the order they ran in. AddressSanitizer watches shared
// and global memory for accesses out of bounds.
//
// What it does not show: speed, coalescing and bank conflicts; memory orders weaker than the
// host's other than through ThreadSanitizer; what nvcc makes of the code; alignment of vector
// accesses (UndefinedBehaviorSanitizer does); launch limits other than those checked in Launch().

#ifndef TIDE_TESTING_CUDA_RUNTIME_H_
#define TIDE_TESTING_CUDA_RUNTIME_H_

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1) : x(x) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };

struct cudaFuncAttributes {
  int ptxVersion;
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace cuda_on_cpu {

// While one exists, ThreadSanitizer does not see what this fiber touches: the emulator's own state.
struct Unwatched {
#if defined(__SANITIZE_THREAD__)
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unwatched() {}
#endif
};

enum class Order { kForward, kBackward, kShuffled };

// What a test may choose.
struct Device {
  int compute_capability_major = 9;  // of the code too
  Order order = Order::kForward;
  uint32_t seed = 0;
  int launches = 0;  // counted
};
inline Device device;

[[noreturn]] inline void Die(const char* message) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", message);
  std::abort();
}

class Cluster;

// One CUDA thread.
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Cluster* cluster = nullptr;
  int block = 0;   // within the cluster
  int thread = 0;  // within the block
  dim3 block_index;
  enum { kReady, kAtBlock, kAtCluster, kAtWarp, kDone } state = kReady;
  int parity = 0;  // of shuffles
  uint64_t slots[2] = {0, 0};
  void* tsan = nullptr;
  void* fake_stack = nullptr;
};

inline Fiber* running_ = nullptr;

inline Fiber* Running() {
  Unwatched scope;
  return running_;
}

inline dim3 ThreadIndex() {
  Unwatched scope;
  return dim3(static_cast<unsigned>(running_->thread));
}

inline dim3 BlockIndex() {
  Unwatched scope;
  return running_->block_index;
}

constexpr size_t kStack = 64 * 1024;
constexpr int kWarpSize = 32;

// Blocks that run at the same time and see each other's shared memory.
class Cluster {
 public:
  Cluster(int64_t first_block, int blocks, int threads, size_t shared,
          const std::function<void()>& body)
      : threads_(threads), body_(body) {
    for (int block = 0; block < blocks; ++block) {
      shared_.emplace_back(
          static_cast<char*>(std::aligned_alloc(16, std::max<size_t>(16, (shared + 15) / 16 * 16))));
      std::memset(shared_.back(), 0xff, shared);  // NaN: nothing may count on zeros
      for (int thread = 0; thread < threads; ++thread) {
        auto fiber = std::make_unique<Fiber>();
        fiber->cluster = this;
        fiber->block = block;
        fiber->thread = thread;
        fiber->block_index = dim3(static_cast<unsigned>(first_block + block));
        Prepare(fiber.get());
        fibers_.push_back(std::move(fiber));
      }
    }
  }

  ~Cluster() {
    for (char* memory : shared_) std::free(memory);
#if defined(__SANITIZE_THREAD__)
    for (auto& fiber : fibers_) __tsan_destroy_fiber(fiber->tsan);
#endif
  }

  void Run() {
    Unwatched scope;
    std::vector<Fiber*> order;
    for (auto& fiber : fibers_) order.push_back(fiber.get());
    if (device.order == Order::kBackward) std::reverse(order.begin(), order.end());
    std::mt19937 random(device.seed);
    Release(this);
    for (;;) {
      if (device.order == Order::kShuffled) std::shuffle(order.begin(), order.end(), random);
      bool any = false;
      for (Fiber* fiber : order) {
        if (fiber->state != Fiber::kReady) continue;
        any = true;
        Resume(fiber);
      }
      if (std::all_of(order.begin(), order.end(), [](Fiber* f) { return f->state == Fiber::kDone; })) {
        break;
      }
      if (!Open() && !any) Die("divergent barrier: some threads wait for threads that do not come");
    }
    Acquire(this);
  }

  char* shared(int block) {
    Unwatched scope;
    return shared_[static_cast<size_t>(block)];
  }
  int blocks() const {
    Unwatched scope;
    return static_cast<int>(shared_.size());
  }

  // The running fiber waits until all that must have come to the same kind of barrier.
  static void Wait(decltype(Fiber::state) at) {
    Unwatched scope;
    Fiber* fiber = running_;
    fiber->state = at;
    void* key = at == Fiber::kAtCluster ? static_cast<void*>(fiber->cluster)
                                        : fiber->cluster->shared(fiber->block);
    if (at != Fiber::kAtWarp) Release(key);  // a shuffle orders nothing but its own values
    Yield(fiber);
    if (at != Fiber::kAtWarp) Acquire(key);
  }

  // The value of another lane.
  static uint64_t Exchange(uint64_t value, int offset) {
    Unwatched scope;
    Fiber* fiber = running_;
    const int parity = fiber->parity;
    fiber->parity ^= 1;
    __atomic_store_n(&fiber->slots[parity], value, __ATOMIC_RELAXED);
    Wait(Fiber::kAtWarp);
    Fiber* other = fiber->cluster->At(fiber->block, fiber->thread ^ offset);
    return __atomic_load_n(&other->slots[parity], __ATOMIC_RELAXED);
  }

  const std::function<void()>& Body() const {
    Unwatched scope;
    return body_;
  }

 private:
  Fiber* At(int block, int thread) {
    return fibers_[static_cast<size_t>(block) * static_cast<size_t>(threads_) +
                   static_cast<size_t>(thread)]
        .get();
  }

  static void Release([[maybe_unused]] void* key) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(key);
#endif
  }

  static void Acquire([[maybe_unused]] void* key) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(key);
#endif
  }

  __attribute__((noinline)) static void Prepare(Fiber* fiber) {
    fiber->stack.reset(new char[kStack]);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, &Cluster::Enter, 0);
#if defined(__SANITIZE_THREAD__)
    fiber->tsan = __tsan_create_fiber(0);
#endif
  }

  static void Enter() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &main_stack_, &main_size_);
#endif
    Fiber* fiber = Running();
    Acquire(fiber->cluster);
    fiber->cluster->Body()();
    Release(fiber->cluster);
    {
      Unwatched scope;
      fiber->state = Fiber::kDone;
    }
    Yield(fiber);
  }

  static void Resume(Fiber* fiber) {
    running_ = fiber;
#if defined(__SANITIZE_THREAD__)
    main_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, fiber->stack.get(), kStack);
#endif
    swapcontext(&main_, &fiber->context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#endif
  }

  static void Yield(Fiber* fiber) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(main_tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fiber->state == Fiber::kDone ? nullptr : &fiber->fake_stack,
                                   main_stack_, main_size_);
#endif
    swapcontext(&fiber->context, &main_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &main_stack_, &main_size_);
#endif
  }

  // Let go every barrier that is complete.
  bool Open() {
    bool opened = false;
    const int per_block = threads_, all = static_cast<int>(fibers_.size());
    opened |= OpenGroup(0, all, Fiber::kAtCluster, true);
    for (int begin = 0; begin < all; begin += per_block) {
      opened |= OpenGroup(begin, begin + per_block, Fiber::kAtBlock, true);
      for (int lane = begin; lane < begin + per_block; lane += kWarpSize) {
        opened |= OpenGroup(lane, std::min(lane + kWarpSize, begin + per_block), Fiber::kAtWarp, false);
      }
    }
    return opened;
  }

  // Threads that have ended count as come to a barrier, but not to a shuffle.
  bool OpenGroup(int begin, int end, decltype(Fiber::state) at, bool done_counts) {
    int waiting = 0;
    for (int i = begin; i < end; ++i) {
      const auto state = fibers_[static_cast<size_t>(i)]->state;
      if (state == at) {
        ++waiting;
      } else if (!(done_counts && state == Fiber::kDone)) {
        return false;
      }
    }
    if (waiting == 0) return false;
    for (int i = begin; i < end; ++i) {
      Fiber* fiber = fibers_[static_cast<size_t>(i)].get();
      if (fiber->state == at) fiber->state = Fiber::kReady;
    }
    return true;
  }

  int threads_;
  const std::function<void()>& body_;
  std::vector<char*> shared_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  inline static ucontext_t main_;
  inline static void* main_tsan_ = nullptr;
  inline static const void* main_stack_ = nullptr;
  inline static size_t main_size_ = 0;
};

inline cudaError_t Launch(const cudaLaunchConfig_t& config, const std::function<void()>& body) {
  int blocks = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      blocks = static_cast<int>(config.attrs[i].val.clusterDim.x);
    }
  }
  const bool fits = config.blockDim.x >= 1 && config.blockDim.x <= 1024 && config.gridDim.x >= 1 &&
                    config.dynamicSmemBytes <= 48 * 1024 && blocks <= 8 &&
                    (blocks == 1 || device.compute_capability_major >= 9) &&
                    config.gridDim.x % static_cast<unsigned>(blocks) == 0;
  if (!fits) return cudaErrorInvalidConfiguration;
  ++device.launches;
  const int64_t clusters = config.gridDim.x / static_cast<unsigned>(blocks);
  for (int64_t i = 0; i < clusters; ++i) {
    const int64_t cluster = device.order == Order::kBackward ? clusters - 1 - i : i;
    Cluster(cluster * blocks, blocks, static_cast<int>(config.blockDim.x), config.dynamicSmemBytes,
            body)
        .Run();
  }
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return cuda_on_cpu::Launch(*config, [&] { kernel(arguments...); });
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = 10 * cuda_on_cpu::device.compute_capability_major;
  return cudaSuccess;
}

inline void __syncthreads() { cuda_on_cpu::Cluster::Wait(cuda_on_cpu::Fiber::kAtBlock); }

template <typename Number>
Number __shfl_xor_sync(unsigned mask, Number value, int offset, int width) {
  if (mask != 0xffffffffu || width != 32) cuda_on_cpu::Die("only whole warps shuffle here");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  bits = cuda_on_cpu::Cluster::Exchange(bits, offset);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

#define threadIdx (cuda_on_cpu::ThreadIndex())
#define blockIdx (cuda_on_cpu::BlockIndex())
#define TIDE_SHARED_MEMORY(name) \
  float* const name = reinterpret_cast<float*>(cuda_on_cpu::SharedMemory())

namespace cuda_on_cpu {

inline char* SharedMemory() {
  Fiber* fiber = Running();
  Unwatched scope;
  return fiber->cluster->shared(fiber->block);
}

}  // namespace cuda_on_cpu

namespace tide {

inline int ClusterRank() {
  cuda_on_cpu::Unwatched scope;
  return cuda_on_cpu::Running()->block;
}

inline int ClusterSize() {
  cuda_on_cpu::Unwatched scope;
  return cuda_on_cpu::Running()->cluster->blocks();
}

inline void ClusterSync() { cuda_on_cpu::Cluster::Wait(cuda_on_cpu::Fiber::kAtCluster); }

inline const float* ClusterPeer(float* own, int rank) {
  cuda_on_cpu::Unwatched scope;
  const char* base = cuda_on_cpu::SharedMemory();
  char* peer = cuda_on_cpu::Running()->cluster->shared(rank);
  return reinterpret_cast<const float*>(peer + (reinterpret_cast<char*>(own) - base));
}

}  // namespace tide

#endif  // TIDE_TESTING_CUDA_RUNTIME_H_
