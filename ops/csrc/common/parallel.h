// The threads that operators share: asleep between calls, so none spins on a core that computes.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace lohan {

// Any thread may call run(), several at once. Under mutex_: everything but pid_, which is fixed.
class WorkerPool {
public:
    // The one of this process: a fork leaves the child without the threads, so it gets another one. Never destroyed,
    // because threads sleep in it until the process ends.
    static WorkerPool& of_process() {
        static std::atomic<WorkerPool*> current{nullptr};
        WorkerPool* pool = current.load(std::memory_order_acquire);
        while (pool == nullptr || pool->pid_ != getpid()) {
            auto* fresh = new WorkerPool();
            if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
            delete fresh;
        }
        return *pool;
    }

    // Calls work() in this thread and in up to `num_helpers` others, and returns when all of them have. The others are
    // not waited for before they begin: what they do not come to do, the caller has done. `work` must not throw.
    template <typename Work>
    void run(int64_t num_helpers, const Work& work) {
        if (num_helpers <= 0) return work();
        Job job{[](const void* context) { (*static_cast<const Work*>(context))(); }, &work, num_helpers, 0};
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            while (num_threads_ < num_helpers && try_start()) ++num_threads_;
            jobs_.push_back(&job);
        }
        for (int64_t helper = 0; helper < num_helpers; ++helper) wanted_.notify_one();
        work();
        std::unique_lock<std::mutex> lock(mutex_);
        jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
        ended_.wait(lock, [&job] { return job.num_running == 0; });
    }

private:
    struct Job {
        void (*call)(const void*);
        const void* context;
        int64_t num_wanted, num_running;   // threads that may still join, and that are in call()
    };

    // False: the system gives no further thread.
    bool try_start() {
        try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            return false;
        }
        return true;
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            wanted_.wait(lock, [this] { return !jobs_.empty(); });
            Job* job = jobs_.front();
            if (--job->num_wanted == 0) jobs_.pop_front();
            ++job->num_running;
            lock.unlock();
            job->call(job->context);
            lock.lock();
            if (--job->num_running == 0) ended_.notify_all();
        }
    }

    const pid_t pid_ = getpid();
    std::mutex mutex_;
    std::condition_variable wanted_, ended_;
    std::deque<Job*> jobs_;
    int64_t num_threads_ = 0;
};

// Calls body(start, end) for pieces of `piece_numel` elements (the last one shorter) that make up [0, numel), on up to
// `num_threads` threads, of which the caller is one. A thread takes the next piece when it is done with one.
template <typename Body>
void for_pieces(int64_t numel, int64_t piece_numel, int num_threads, const Body& body) {
    const int64_t num_pieces = (numel + piece_numel - 1) / piece_numel;
    std::atomic<int64_t> next{0};
    const auto work = [&body, &next, numel, piece_numel, num_pieces] {
        for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < num_pieces;) {
            body(piece * piece_numel, std::min((piece + 1) * piece_numel, numel));
        }
    };
    WorkerPool::of_process().run(std::min<int64_t>(num_threads, num_pieces) - 1, work);
}

}  // namespace lohan
