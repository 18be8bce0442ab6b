// Reads and writes of files on a few threads of its own, the most urgent first, with the checksums of what is moved.
//
// [Note: pieces] in lohan_ds/store/pieces.py says how a request is cut; a piece is what one thread does at a time.
// Nothing here knows Python: what has ended is put into a list, and an eventfd tells when there is something in it.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <queue>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include "../common/isa.h"
#include "xxh3.h"

namespace lohan {

enum class Verb { kRead = 0, kWrite = 1, kSync = 2 };                     // the numbers are known to native_io.py
enum class Reason { kNone = 0, kSystem = 1, kShort = 2, kDamaged = 3 };   // these too

constexpr int64_t kPageBytes = 4096;
constexpr int kMaxVectors = 512;         // of one system call; the kernel's limit is 1024
constexpr int kMaxIdleRetries = 1000;    // of EAGAIN without progress, 1 ms apart

// Neighbouring records of a file; in memory there may be gaps between them.
struct Request {
    int64_t id;
    Verb verb;
    int fd;
    bool direct;              // offsets, lengths and addresses are multiples of kPageBytes
    int urgency;              // the lowest number first
    int64_t offset, nbytes;   // in the file
    char* memory;             // of the first record
    int64_t record_bytes;     // of all records but the last, which may be shorter
    int64_t stride_bytes;     // in memory, from one record's start to the next
    uint64_t* checksums;      // (records, pieces): noted by a write, compared by a read; or null
    int64_t row_numel;        // in `checksums`, from one record's row to the next
};

struct Failure {
    Reason reason = Reason::kNone;
    int error_number = 0;
    int64_t offset = 0, got_bytes = 0, needed_bytes = 0;        // of the piece, in the file
    int64_t record = 0, piece = 0;                              // of what is damaged
    uint64_t got_checksum = 0, needed_checksum = 0;
};

struct Span {                 // one piece; seconds of CLOCK_MONOTONIC, which is Python's perf_counter
    double start_s, end_s;
    int64_t nbytes;
};

struct Done {
    int64_t id;
    Failure failure;          // the one that comes first in the file
    int64_t moved_bytes;      // by the pieces that succeeded
    std::vector<Span> spans;
};

struct Waiting {              // a system call that has not returned
    int64_t id;
    int64_t offset, nbytes;
    double since_s;
};

inline double monotonic_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The system calls, apart so that a test can put faults in their place. Each returns -errno when it fails.
class System {
public:
    virtual ~System() = default;

    virtual int64_t move(Verb verb, int fd, const iovec* vectors, int count, int64_t offset) {
        const ssize_t moved = verb == Verb::kRead ? preadv(fd, vectors, count, offset)
                                                  : pwritev(fd, vectors, count, offset);
        return moved < 0 ? -errno : moved;
    }

    virtual int64_t sync(int fd) { return fdatasync(fd) < 0 ? -errno : 0; }

    virtual void pause() {
        const timespec millisecond{0, 1'000'000};
        nanosleep(&millisecond, nullptr);
    }
};

// Any thread. Under mutex_: all but what is const, and the seats, which have mutexes of their own. The threads own it
// too, so it lives until all that was submitted is done, whoever lets go of it.
class IoPool : public std::enable_shared_from_this<IoPool> {
public:
    // `event_fd`: of an eventfd, the caller's, open until has_ended(). Throws std::system_error if there is no thread.
    static std::shared_ptr<IoPool> start(int num_threads, int64_t piece_bytes, int event_fd,
                                         std::shared_ptr<System> system = std::make_shared<System>()) {
        std::shared_ptr<IoPool> pool(new IoPool(num_threads, piece_bytes, event_fd, std::move(system)));
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);   // signals are for the threads of the program
        for (int i = 0; i < num_threads; ++i) {
            try {
                std::thread([pool, i] { pool->serve(pool->seats_[static_cast<size_t>(i)]); }).detach();
            } catch (const std::system_error&) {
                const std::lock_guard<std::mutex> lock(pool->mutex_);
                pool->num_threads_ -= num_threads - i;
                break;
            }
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        const std::lock_guard<std::mutex> lock(pool->mutex_);
        if (pool->num_threads_ == 0 && num_threads > 0) throw std::system_error(EAGAIN, std::generic_category());
        return pool;
    }

    IoPool(const IoPool&) = delete;
    IoPool& operator=(const IoPool&) = delete;

    // Does not block. False once `end` was called, or in a child of the process that made this.
    bool submit(const Request& request) {
        auto flight = std::make_shared<Flight>();
        flight->request = request;
        const std::vector<std::pair<int64_t, int64_t>> pieces = cut(request);
        flight->num_left = pieces.size();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (ending_ || pid_ != getpid()) return false;
            for (const auto& [start, nbytes] : pieces) {
                queue_.push({request.urgency, num_submitted_++, flight, start, nbytes});
            }
        }
        if (pieces.size() == 1) wanted_.notify_one();
        else wanted_.notify_all();
        return true;
    }

    // Requests that have not begun fail with ECANCELED, from now on.
    void cancel() { is_cancelled_.store(true, std::memory_order_relaxed); }

    // The threads end after all that was submitted. Does not block. Idempotent.
    void end() {
        if (pid_ != getpid()) return;    // a fork has left the child no threads, and the mutex perhaps locked
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        wanted_.notify_all();
    }

    std::vector<Done> take_done() {
        std::vector<Done> taken;
        const std::lock_guard<std::mutex> lock(mutex_);
        taken.swap(done_);
        return taken;
    }

    // Nothing will come into the list any more.
    bool has_ended() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return num_threads_ == 0 && done_.empty();
    }

    std::vector<Waiting> waiting() {
        std::vector<Waiting> found;
        for (Seat& seat : seats_) {
            const std::lock_guard<std::mutex> lock(seat.mutex);
            if (seat.is_waiting) found.push_back(seat.call);
        }
        return found;
    }

private:
    struct Flight {              // a request that has not ended
        Request request;
        size_t num_left = 0;     // pieces; this and the rest are under mutex_
        Failure failure;
        int64_t moved_bytes = 0;
        std::vector<Span> spans;
    };

    struct Piece {
        int urgency;
        int64_t order;
        std::shared_ptr<Flight> flight;
        int64_t start, nbytes;   // in the file, from the start of the request

        bool operator<(const Piece& other) const {   // of two, the greater one goes first
            return std::tie(other.urgency, other.order) < std::tie(urgency, order);
        }
    };

    struct Seat {                // of a thread
        std::mutex mutex;
        bool is_waiting = false;
        Waiting call{};
    };

    struct Part {                // what has a checksum of its own
        char* memory;
        int64_t nbytes, record, piece;
    };

    IoPool(int num_threads, int64_t piece_bytes, int event_fd, std::shared_ptr<System> system)
        : piece_bytes_(piece_bytes), event_fd_(event_fd), system_(std::move(system)),
          seats_(static_cast<size_t>(num_threads)), num_threads_(num_threads) {}

    // (start, nbytes) of each piece, from the start of the request.
    std::vector<std::pair<int64_t, int64_t>> cut(const Request& r) const {
        std::vector<std::pair<int64_t, int64_t>> pieces;
        if (r.verb == Verb::kSync) return {{0, 0}};
        const bool many = r.record_bytes <= piece_bytes_;
        const int64_t records_bytes = many ? piece_bytes_ / r.record_bytes * r.record_bytes : r.record_bytes;
        for (int64_t start = 0; start < r.nbytes; start += records_bytes) {
            const int64_t end = std::min(start + records_bytes, r.nbytes);
            for (int64_t at = start; at < end; at += piece_bytes_) {
                pieces.emplace_back(at, std::min(piece_bytes_, end - at));
            }
        }
        return pieces;
    }

    std::vector<Part> parts(const Request& r, int64_t start, int64_t nbytes) const {
        std::vector<Part> found;
        for (int64_t at = start; at < start + nbytes;) {
            const int64_t record = at / r.record_bytes, in_record = at % r.record_bytes, piece = in_record / piece_bytes_;
            const int64_t end = std::min({r.record_bytes * record + std::min(r.record_bytes, (piece + 1) * piece_bytes_),
                                          start + nbytes});
            found.push_back({r.memory + record * r.stride_bytes + in_record, end - at, record, piece});
            at = end;
        }
        return found;
    }

    void serve(Seat& seat) {
        pthread_setname_np(pthread_self(), "lohan-ssd-io");
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            wanted_.wait(lock, [this] { return ending_ || !queue_.empty(); });
            if (queue_.empty()) break;
            const Piece piece = queue_.top();
            queue_.pop();
            lock.unlock();
            const double start_s = monotonic_s();
            Failure failure = run(seat, piece);
            const Span span{start_s, monotonic_s(), piece.nbytes};
            lock.lock();
            leave(*piece.flight, failure, span);
        }
        if (--num_threads_ == 0) tell();   // under the mutex: nobody may close the eventfd before
    }

    void leave(Flight& flight, const Failure& failure, const Span& span) {
        if (failure.reason == Reason::kNone) {
            flight.moved_bytes += span.nbytes;
        } else if (flight.failure.reason == Reason::kNone || failure.offset < flight.failure.offset) {
            flight.failure = failure;
        }
        flight.spans.push_back(span);
        if (--flight.num_left > 0) return;
        if (done_.empty()) tell();
        done_.push_back({flight.request.id, flight.failure, flight.moved_bytes, std::move(flight.spans)});
    }

    void tell() {
        const uint64_t one = 1;
        while (write(event_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {}
    }

    Failure run(Seat& seat, const Piece& piece) {
        const Request& r = piece.flight->request;
        if (is_cancelled_.load(std::memory_order_relaxed)) {
            return {Reason::kSystem, ECANCELED, r.offset + piece.start, 0, piece.nbytes, 0, 0, 0, 0};
        }
        if (r.verb == Verb::kSync) return sync(seat, r);
        const std::vector<Part> of_piece = parts(r, piece.start, piece.nbytes);
        if (r.checksums != nullptr && r.verb == Verb::kWrite) {
            for (const Part& part : of_piece) *noted(r, part) = xxh3_64(part.memory, part.nbytes, isa_);
        }
        Failure failure = transfer(seat, r, of_piece, r.offset + piece.start, piece.nbytes);
        if (r.checksums == nullptr || r.verb == Verb::kWrite || failure.reason != Reason::kNone) return failure;
        for (const Part& part : of_piece) {
            const uint64_t got = xxh3_64(part.memory, part.nbytes, isa_), needed = *noted(r, part);
            if (got == needed) continue;
            return {Reason::kDamaged, EIO, r.offset + piece.start, part.nbytes, part.nbytes,
                    part.record, part.piece, got, needed};
        }
        return failure;
    }

    static uint64_t* noted(const Request& r, const Part& part) {
        return r.checksums + part.record * r.row_numel + part.piece;
    }

    Failure sync(Seat& seat, const Request& r) {
        int64_t result;
        do {
            sit(seat, {r.id, 0, 0, monotonic_s()});
            result = system_->sync(r.fd);
            rise(seat);
        } while (result == -EINTR);
        return result < 0 ? Failure{Reason::kSystem, static_cast<int>(-result), 0, 0, 0, 0, 0, 0, 0} : Failure{};
    }

    // Repeats the system call until all is moved, or cannot be.
    Failure transfer(Seat& seat, const Request& r, const std::vector<Part>& of_piece, int64_t offset, int64_t nbytes) {
        std::vector<iovec> vectors = vectors_of(of_piece);
        size_t first = 0;        // of the vectors, not moved yet
        int64_t done = 0;
        int idle_retries = 0;
        const auto failed = [&](Reason reason, int number) {
            return Failure{reason, number, offset, done, nbytes, 0, 0, 0, 0};
        };
        while (done < nbytes) {
            const int count = static_cast<int>(std::min<size_t>(vectors.size() - first, kMaxVectors));
            sit(seat, {r.id, offset + done, nbytes - done, monotonic_s()});
            int64_t moved = system_->move(r.verb, r.fd, &vectors[first], count, offset + done);
            rise(seat);
            if (moved == -EINTR) continue;
            if (moved == -EAGAIN && idle_retries < kMaxIdleRetries) {
                ++idle_retries;
                system_->pause();
                continue;
            }
            if (moved < 0) return failed(Reason::kSystem, static_cast<int>(-moved));
            if (r.direct) moved -= moved % kPageBytes;    // a tail off the alignment is moved again
            if (moved == 0) return failed(Reason::kShort, EIO);
            done += moved;
            idle_retries = 0;
            for (auto left = static_cast<size_t>(moved); left > 0;) {
                iovec& vector = vectors[first];
                const size_t taken = std::min(left, vector.iov_len);
                vector.iov_base = static_cast<char*>(vector.iov_base) + taken;
                vector.iov_len -= taken;
                left -= taken;
                if (vector.iov_len == 0) ++first;
            }
        }
        return {};
    }

    // Of neighbours in memory, one.
    static std::vector<iovec> vectors_of(const std::vector<Part>& of_piece) {
        std::vector<iovec> vectors;
        for (const Part& part : of_piece) {
            if (!vectors.empty() && static_cast<char*>(vectors.back().iov_base) + vectors.back().iov_len == part.memory) {
                vectors.back().iov_len += static_cast<size_t>(part.nbytes);
            } else {
                vectors.push_back({part.memory, static_cast<size_t>(part.nbytes)});
            }
        }
        return vectors;
    }

    static void sit(Seat& seat, const Waiting& call) {
        const std::lock_guard<std::mutex> lock(seat.mutex);
        seat.is_waiting = true;
        seat.call = call;
    }

    static void rise(Seat& seat) {
        const std::lock_guard<std::mutex> lock(seat.mutex);
        seat.is_waiting = false;
    }

    const pid_t pid_ = getpid();
    const int64_t piece_bytes_;
    const int event_fd_;
    const Isa isa_ = resolve(Isa::kBest);
    const std::shared_ptr<System> system_;
    std::vector<Seat> seats_;
    std::mutex mutex_;
    std::condition_variable wanted_;
    std::priority_queue<Piece> queue_;
    std::vector<Done> done_;
    int64_t num_submitted_ = 0;
    int num_threads_;
    bool ending_ = false;
    std::atomic<bool> is_cancelled_{false};
};

}  // namespace lohan
