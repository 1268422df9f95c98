// Reads and writes of a list of chunks through io_uring, with the system calls themselves, and their checksums.
//
// One thread at a time uses a ring. It starts as many chunks as there are buffers, and copies one while the kernel
// works on the others. Only memory that is marked as direct is handed to the kernel itself: other memory may be
// unaligned, and a fork must not share pages that a disk writes into.
#include "block_hash.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define MZ_HAS_RING 1
#include <cerrno>
#include <csignal>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#else
#include <cerrno>
#endif

using namespace mz;

namespace {

constexpr int64_t ALIGNMENT = 4096;
constexpr int64_t ENDED = -1;      // nothing more was read or written
constexpr int64_t NO_ANSWER = -2;  // the kernel has not answered in time
constexpr int64_t MOST_TRIES = 1000;

// A row of the table of chunks.
struct Chunk {
  int64_t file;    // descriptor
  int64_t offset;  // in the file, aligned
  uint8_t* memory;
  int64_t bytes;   // at most those of a buffer
  int64_t piece;   // index of its checksum
  int64_t block;   // number of its first block in the piece
  int64_t direct;  // whether its memory needs no buffer
  int64_t padded() const { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
};

}  // namespace

// Adds the checksum of bytes to *sum, and copies them unless `to` is null: what a ring does, for those without.
MZ_API void copy_with_checksum(int64_t, uint8_t* to, const uint8_t* from, int64_t bytes, int64_t block, uint64_t* sum) {
  *sum += checksum(to, from, bytes, block);
}

#ifdef MZ_HAS_RING
namespace {

struct Ring {
  int fd = -1;
  bool registered = false, limits_waits = false;
  uint8_t* buffers = nullptr;
  int64_t buffer_bytes = 0, count = 0;
  void *submissions = MAP_FAILED, *completions = MAP_FAILED;
  io_uring_sqe* entries = (io_uring_sqe*)MAP_FAILED;
  size_t submission_bytes = 0, completion_bytes = 0, entry_bytes = 0;
  io_uring_params made = {};

  uint32_t* of(void* map, uint32_t offset) const { return (uint32_t*)((uint8_t*)map + offset); }
  io_uring_cqe* completed(uint32_t at) const { return (io_uring_cqe*)of(completions, made.cq_off.cqes) + at; }

  ~Ring() {
    if (entries != MAP_FAILED) munmap(entries, entry_bytes);
    if (completions != MAP_FAILED) munmap(completions, completion_bytes);
    if (submissions != MAP_FAILED) munmap(submissions, submission_bytes);
    if (fd >= 0) close(fd);
  }

  // A child of a fork must not see the queues: both processes would write into them.
  void* map(size_t bytes, off_t what) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (found != MAP_FAILED) madvise(found, bytes, MADV_DONTFORK);
    return found;
  }

  // errno of the first step that fails, else 0.
  int open() {
    fd = (int)syscall(SYS_io_uring_setup, (unsigned)count, &made);
    if (fd < 0) return errno;
    limits_waits = made.features & IORING_FEAT_EXT_ARG;
    submission_bytes = made.sq_off.array + made.sq_entries * sizeof(uint32_t);
    completion_bytes = made.cq_off.cqes + made.cq_entries * sizeof(io_uring_cqe);
    entry_bytes = made.sq_entries * sizeof(io_uring_sqe);
    if ((submissions = map(submission_bytes, IORING_OFF_SQ_RING)) == MAP_FAILED) return errno;
    if ((completions = map(completion_bytes, IORING_OFF_CQ_RING)) == MAP_FAILED) return errno;
    if ((entries = (io_uring_sqe*)map(entry_bytes, IORING_OFF_SQES)) == MAP_FAILED) return errno;
    return 0;
  }

  int register_buffers() {
    std::vector<iovec> all(count);
    for (int64_t i = 0; i < count; ++i) all[i] = {buffers + i * buffer_bytes, (size_t)buffer_bytes};
    if (syscall(SYS_io_uring_register, fd, IORING_REGISTER_BUFFERS, all.data(), (unsigned)count) < 0) return errno;
    registered = true;
    return 0;
  }

  // Starts a read or write of memory, which belongs to a buffer unless it is direct. Returns errno, 0 if it is started.
  int start(bool write, int64_t file, int64_t offset, int64_t buffer, bool direct, uint8_t* memory, int64_t bytes) {
    bool fixed = registered && !direct;
    uint32_t *tail = of(submissions, made.sq_off.tail), mask = *of(submissions, made.sq_off.ring_mask), at = *tail & mask;
    io_uring_sqe& entry = entries[at];
    memset(&entry, 0, sizeof entry);
    entry.opcode = fixed ? (write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED) : (write ? IORING_OP_WRITE : IORING_OP_READ);
    entry.fd = (int)file;
    entry.off = (uint64_t)offset;
    entry.addr = (uint64_t)memory;
    entry.len = (uint32_t)bytes;
    entry.buf_index = fixed ? (uint16_t)buffer : 0;
    entry.user_data = (uint64_t)buffer;
    of(submissions, made.sq_off.array)[at] = at;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    for (int64_t tries = 1; syscall(SYS_io_uring_enter, fd, 1u, 0u, 0u, nullptr, 0) < 1; ++tries)
      if ((errno != EINTR && errno != EAGAIN && errno != EBUSY) || tries == MOST_TRIES) {
        int code = errno;
        __atomic_store_n(tail, *tail - 1, __ATOMIC_RELEASE);  // the kernel has not taken it
        return code;
      }
    return 0;
  }

  // Waits for an answer: true with the buffer and the result, false with errno in *result.
  bool next(int64_t seconds, int64_t* buffer, int64_t* result) {
    uint32_t *head = of(completions, made.cq_off.head), *tail = of(completions, made.cq_off.tail);
    while (*head == __atomic_load_n(tail, __ATOMIC_ACQUIRE)) {
      __kernel_timespec limit{seconds, 0};
      io_uring_getevents_arg timed{0, _NSIG / 8, 0, (uint64_t)&limit};
      long entered = limits_waits ? syscall(SYS_io_uring_enter, fd, 0u, 1u, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &timed, sizeof timed)
                                  : syscall(SYS_io_uring_enter, fd, 0u, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (entered < 0 && errno != EINTR) {
        *result = errno == ETIME ? NO_ANSWER : errno;
        return false;
      }
    }
    io_uring_cqe* answer = completed(*head & *of(completions, made.cq_off.ring_mask));
    *buffer = (int64_t)answer->user_data;
    *result = answer->res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return true;
  }
};

// The chunks of one call on their way through the buffers.
struct Passage {
  Ring& ring;
  bool write;
  const Chunk* chunks;
  int64_t count, seconds;
  uint64_t* sums;
  int64_t error = 0, where = 0, reached = 0;  // of the first failure: code, chunk, bytes of it
  int64_t started = 0, in_flight = 0;
  std::vector<int64_t> chunk_of, done, tries, free;

  Passage(Ring& ring, bool write, const Chunk* chunks, int64_t count, int64_t seconds, uint64_t* sums)
      : ring(ring), write(write), chunks(chunks), count(count), seconds(seconds), sums(sums), chunk_of(ring.count), done(ring.count), tries(ring.count) {
    for (int64_t i = ring.count; i-- > 0;) free.push_back(i);
  }

  uint8_t* memory(int64_t buffer) const { return ring.buffers + buffer * ring.buffer_bytes; }

  void fail(int64_t code, int64_t chunk, int64_t bytes) {
    if (error) return;
    error = code, where = chunk, reached = bytes;
  }

  void resume(int64_t buffer) {
    const Chunk& chunk = chunks[chunk_of[buffer]];
    uint8_t* from = (chunk.direct ? chunk.memory : memory(buffer)) + done[buffer];
    int code = ring.start(write, chunk.file, chunk.offset + done[buffer], buffer, chunk.direct, from, chunk.padded() - done[buffer]);
    if (code)
      fail(code, chunk_of[buffer], done[buffer]), free.push_back(buffer);
    else
      ++in_flight;
  }

  void begin() {
    int64_t buffer = free.back();
    free.pop_back();
    chunk_of[buffer] = started, done[buffer] = tries[buffer] = 0;
    const Chunk& chunk = chunks[started++];
    if (write) sums[chunk.piece] += checksum(chunk.direct ? nullptr : memory(buffer), chunk.memory, chunk.bytes, chunk.block);
    if (write && !chunk.direct) memset(memory(buffer) + chunk.bytes, 0, chunk.padded() - chunk.bytes);
    resume(buffer);
  }

  // A short answer is resumed at the last aligned byte. A file may end behind a chunk's bytes, before its padding.
  void take(int64_t buffer, int64_t result) {
    --in_flight;
    const Chunk& chunk = chunks[chunk_of[buffer]];
    if ((result == -EINTR || result == -EAGAIN) && ++tries[buffer] < MOST_TRIES) return resume(buffer);
    if (result < 0) return fail(-result, chunk_of[buffer], done[buffer]), free.push_back(buffer);
    int64_t now = done[buffer] + result, needed = write ? chunk.padded() : chunk.bytes;
    if (now < needed) {
      int64_t kept = now / ALIGNMENT * ALIGNMENT;
      if (kept == done[buffer]) return fail(ENDED, chunk_of[buffer], now), free.push_back(buffer);
      done[buffer] = kept;
      return resume(buffer);
    }
    if (!write && chunk.direct) sums[chunk.piece] += checksum(nullptr, chunk.memory, chunk.bytes, chunk.block);
    if (!write && !chunk.direct) sums[chunk.piece] += checksum(chunk.memory, memory(buffer), chunk.bytes, chunk.block);
    free.push_back(buffer);
  }

  // After a failure nothing new is started, and what the kernel still has is waited for.
  void run() {
    for (;;) {
      while (!error && started < count && !free.empty()) begin();
      if (!in_flight) return;
      int64_t buffer, result;
      if (!ring.next(seconds, &buffer, &result)) {
        error = 0;
        return fail(result, started - 1, 0);
      }
      take(buffer, result);
    }
  }
};

}  // namespace

// answer: {address of the ring, or 0; errno of its setup; errno of registering its buffers, which then are ordinary ones}
MZ_API void disk_ring_open(int64_t, uint8_t* buffers, int64_t buffer_bytes, int64_t count, int64_t* answer) {
  Ring* ring = new Ring;
  ring->buffers = buffers, ring->buffer_bytes = buffer_bytes, ring->count = count;
  answer[0] = answer[2] = 0;
  answer[1] = ring->open();
  if (answer[1]) {
    delete ring;
    return;
  }
  answer[2] = ring->register_buffers();
  answer[0] = (int64_t)ring;
}

// Reads or writes all chunks, and adds the checksums of pieces to `sums`.
// answer: {0, an errno, ENDED or NO_ANSWER; the chunk that failed; bytes of it that were moved; chunks in flight}
// Chunks in flight are those for which waiting has failed: the kernel may still use their buffers.
MZ_API void disk_ring_move(int64_t, int64_t ring, int64_t write, const int64_t* chunks, int64_t count, int64_t seconds, uint64_t* sums,
                           int64_t* answer) {
  Passage passage(*(Ring*)ring, write != 0, (const Chunk*)chunks, count, seconds, sums);
  passage.run();
  answer[0] = passage.error, answer[1] = passage.where, answer[2] = passage.reached, answer[3] = passage.in_flight;
}

MZ_API void disk_ring_close(int64_t, int64_t ring) { delete (Ring*)ring; }

#else  // no io_uring in this system

MZ_API void disk_ring_open(int64_t, uint8_t*, int64_t, int64_t, int64_t* answer) { answer[0] = answer[2] = 0, answer[1] = ENOSYS; }
MZ_API void disk_ring_move(int64_t, int64_t, int64_t, const int64_t*, int64_t, int64_t, uint64_t*, int64_t* answer) { answer[0] = ENOSYS; }
MZ_API void disk_ring_close(int64_t, int64_t) {}

#endif
