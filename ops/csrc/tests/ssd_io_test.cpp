// Runs the I/O threads without Python, for the address and thread sanitizers (lohan_ds/tests/test_ops.py builds it so).
// What disks do to us is put into the system calls: parts moved, interruptions, errors. usage: ssd_io_test FOLDER
// Ends with 0 if every byte, checksum and failure was right, else says which was not and ends with 1.
#include <sys/eventfd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "../ssd_io/op.h"

namespace {

using lohan::Done;
using lohan::IoPool;
using lohan::Reason;
using lohan::Verb;

constexpr int64_t kPieceBytes = 4 * lohan::kPageBytes;
int num_bad = 0;

void expect(bool right, const char* what, long long got = 0) {
    if (right) return;
    ++num_bad;
    std::printf("wrong: %s (got %lld)\n", what, got);
}

// Moves parts of what is asked for, and is often interrupted or busy; from a given byte of the file on it fails.
class Disk : public lohan::System {
public:
    std::atomic<int64_t> bad_from{INT64_MAX};
    std::atomic<int> error_number{EIO};
    std::atomic<int> num_calls{0};
    std::atomic<bool> busy_for_ever{false};

    int64_t move(Verb verb, int fd, const iovec* vectors, int count, int64_t offset) override {
        const int call = num_calls++;
        if (busy_for_ever || call % 5 == 3) return -EAGAIN;
        if (call % 5 == 1) return -EINTR;
        if (offset >= bad_from) return error_number == 0 ? 0 : -error_number;
        iovec part = vectors[0];
        const int64_t most = std::min<int64_t>(bad_from - offset, 100 + call % 7 * 1000);
        if (call % 2 && bad_from == INT64_MAX) return System::move(verb, fd, vectors, count, offset);
        part.iov_len = std::min(part.iov_len, static_cast<size_t>(most));
        return System::move(verb, fd, &part, 1, offset);
    }

    int64_t sync(int fd) override { return bad_from == INT64_MAX ? System::sync(fd) : -error_number; }
    void pause() override {}
};

// A pool, and what Python does with it.
class Caller {
public:
    explicit Caller(int num_threads, std::shared_ptr<lohan::System> system)
        : event_fd_(eventfd(0, EFD_CLOEXEC)), pool_(IoPool::start(num_threads, kPieceBytes, event_fd_, system)) {}

    ~Caller() {
        pool_->end();
        while (!pool_->has_ended()) take();
        lohan::Request late{};
        late.verb = Verb::kSync;
        expect(!pool_->submit(late), "submitted after the end");
        close(event_fd_);
    }

    IoPool& pool() { return *pool_; }

    const Done& wait(int64_t id) {
        while (!done_.count(id)) take();
        return done_.at(id);
    }

private:
    void take() {
        uint64_t count;
        if (read(event_fd_, &count, sizeof(count)) < 0) std::abort();
        for (Done& done : pool_->take_done()) done_.emplace(done.id, std::move(done));
    }

    const int event_fd_;
    const std::shared_ptr<IoPool> pool_;
    std::map<int64_t, Done> done_;
};

struct Arrays {                       // `count` records in memory, `stride` records apart
    std::vector<char> bytes;
    std::vector<uint64_t> checksums;
    lohan::Request request;

    Arrays(Verb verb, int64_t id, int fd, int64_t offset, int64_t record_bytes, int64_t count, int64_t stride,
           int64_t last_bytes)
        : bytes(static_cast<size_t>((count - 1) * stride * record_bytes + last_bytes)) {
        const int64_t row_numel = (record_bytes + kPieceBytes - 1) / kPieceBytes;
        checksums.resize(static_cast<size_t>(count * row_numel));
        request = {id, verb, fd, false, 1, offset, (count - 1) * record_bytes + last_bytes, bytes.data(), record_bytes,
                   stride * record_bytes, checksums.data(), row_numel};
    }
};

void fill(std::vector<char>& bytes, uint32_t seed) {
    for (char& byte : bytes) byte = static_cast<char>((seed = seed * 1664525u + 1013904223u) >> 24);
}

// Records of every kind of size, written with gaps in memory and read back without, and the other way round.
void round_trips(Caller& caller, int fd, int64_t& id) {
    for (const int64_t record_bytes : {int64_t{1}, int64_t{1000}, kPieceBytes, 2 * kPieceBytes + 77}) {
        for (const int64_t stride : {1, 3}) {
            const int64_t count = record_bytes < 10 ? 3000 : 7, last_bytes = (record_bytes + 1) / 2;
            Arrays out(Verb::kWrite, id++, fd, 11, record_bytes, count, stride, last_bytes);
            Arrays in(Verb::kRead, id++, fd, 11, record_bytes, count, 4 - stride, last_bytes);
            fill(out.bytes, static_cast<uint32_t>(id));
            caller.pool().submit(out.request);
            expect(caller.wait(out.request.id).failure.reason == Reason::kNone, "write");
            in.checksums = out.checksums;
            in.request.checksums = in.checksums.data();
            caller.pool().submit(in.request);
            const Done& done = caller.wait(in.request.id);
            expect(done.failure.reason == Reason::kNone, "read", static_cast<int>(done.failure.reason));
            expect(done.moved_bytes == in.request.nbytes, "moved bytes", done.moved_bytes);
            for (int64_t i = 0; i < in.request.nbytes; ++i) {
                const int64_t record = i / record_bytes, within = i % record_bytes;
                const auto at = [&](int64_t step) { return static_cast<size_t>(record * step * record_bytes + within); };
                if (in.bytes[at(4 - stride)] != out.bytes[at(stride)]) return expect(false, "bytes", i);
            }
            in.checksums[static_cast<size_t>((count - 1) * in.request.row_numel)] ^= 1;   // that part is found
            caller.pool().submit(in.request = [&] { auto r = in.request; r.id = id++; return r; }());
            const lohan::Failure& damage = caller.wait(in.request.id).failure;
            expect(damage.reason == Reason::kDamaged && damage.record == count - 1, "damaged record", damage.record);
            expect((damage.got_checksum ^ damage.needed_checksum) == 1, "checksum");
        }
    }
}

void failures(Caller& caller, Disk& disk, int fd, int64_t& id) {
    Arrays out(Verb::kWrite, id++, fd, 0, 3 * kPieceBytes, 1, 1, 3 * kPieceBytes);
    disk.bad_from = kPieceBytes + 500;
    for (const int number : {ENOSPC, EIO, 0}) {
        disk.error_number = number;
        out.request.id = id++;
        caller.pool().submit(out.request);
        const Done& done = caller.wait(out.request.id);
        expect(done.failure.reason == (number ? Reason::kSystem : Reason::kShort), "reason");
        expect(done.failure.error_number == (number ? number : EIO), "errno", done.failure.error_number);
        expect(done.failure.offset == kPieceBytes, "the first piece that fails", done.failure.offset);
        expect(done.failure.needed_bytes == kPieceBytes, "needed bytes", done.failure.needed_bytes);
    }
    disk.error_number = EIO;
    out.request.verb = Verb::kSync;
    out.request.id = id++;
    caller.pool().submit(out.request);
    expect(caller.wait(out.request.id).failure.error_number == EIO, "sync");
    disk.bad_from = INT64_MAX;
    out.request.id = id++;
    caller.pool().submit(out.request);
    expect(caller.wait(out.request.id).failure.reason == Reason::kNone, "sync after it");
    disk.busy_for_ever = true;
    out.request.verb = Verb::kRead;
    out.request.id = id++;
    caller.pool().submit(out.request);
    expect(caller.wait(out.request.id).failure.error_number == EAGAIN, "busy for ever");
    disk.busy_for_ever = false;
}

// One thread, held in its first call: of what comes meanwhile the urgent ones go first, else in order.
class Held : public lohan::System {
public:
    std::mutex go;
    std::vector<int64_t> offsets;

    int64_t move(Verb verb, int fd, const iovec* vectors, int count, int64_t offset) override {
        const std::lock_guard<std::mutex> lock(go);
        offsets.push_back(offset);
        return System::move(verb, fd, vectors, count, offset);
    }
};

void urgent_first(int fd) {
    const auto held = std::make_shared<Held>();
    std::vector<Arrays> reads;
    for (int64_t i = 0; i < 7; ++i) reads.emplace_back(Verb::kRead, i, fd, i, 1, 1, 1, 1);
    for (size_t i = 0; i < 7; ++i) {
        reads[i].request.checksums = nullptr;
        reads[i].request.urgency = static_cast<int>(i == 0 ? 0 : 2 - i % 3);
    }
    Caller caller(1, held);
    {
        const std::lock_guard<std::mutex> lock(held->go);
        caller.pool().submit(reads[0].request);
        while (caller.pool().waiting().empty()) std::this_thread::yield();
        expect(caller.pool().waiting()[0].id == 0, "who waits");
        for (size_t i = 1; i < 7; ++i) caller.pool().submit(reads[i].request);
    }
    for (int64_t i = 0; i < 7; ++i) caller.wait(i);
    expect(held->offsets == std::vector<int64_t>{0, 2, 5, 1, 4, 3, 6}, "the order of requests");
    expect(caller.pool().waiting().empty(), "nobody waits");
}

// Several threads submit while several serve, and the pool's owner goes away before they are done.
void many_callers(int fd) {
    std::vector<Arrays> reads;
    for (int64_t i = 0; i < 64; ++i) reads.emplace_back(Verb::kRead, i, fd, 0, 1000, 5, 1, 1000);
    for (Arrays& arrays : reads) arrays.request.checksums = nullptr;
    Caller caller(4, std::make_shared<lohan::System>());
    std::vector<std::thread> threads;
    for (size_t first = 0; first < 4; ++first) {
        threads.emplace_back([&caller, &reads, first] {
            for (size_t i = first; i < 64; i += 4) caller.pool().submit(reads[i].request);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
    const std::string path = std::string(argc > 1 ? argv[1] : ".") + "/ssd_io_test.bin";
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || unlink(path.c_str()) < 0 || ftruncate(fd, 20 * kPieceBytes) < 0) return 2;
    int64_t id = 0;
    {
        const auto disk = std::make_shared<Disk>();
        Caller caller(3, disk);
        round_trips(caller, fd, id);
        failures(caller, *disk, fd, id);
    }
    urgent_first(fd);
    many_callers(fd);
    close(fd);
    return num_bad != 0;
}
