// The lanes, and the thread that serves them.

#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "events.hpp"
#include "text.hpp"

namespace pdd {

constexpr size_t kReadBytes = 64 * 1024;  // at once; an event is no longer
constexpr size_t kMaxListBytes = 4096;  // of the token IDs of one event
constexpr uint32_t kMaxGaps = 512;  // of a lane; their median is all that is asked for
constexpr int kEventsPerTurn = 256;
constexpr uint64_t kStopSignal = 0;  // lanes are numbered from one

// A descriptor of our own: of a socket of Python's, whatever becomes of Python's own, or of the kernel's.
class Descriptor {
 public:
  static Descriptor copy_of(int fd) { return Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

// While it lives, neither this thread nor one that it starts is interrupted: signals are Python's.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// Why a lane has stopped, for those who count; all that matters is in its bytes. Python knows the same numbers.
enum Reason : int32_t { kRunning, kOtherEvent, kEngineClosed, kClientClosed, kTakenBack };

struct Lane {
  Descriptor engine, client;
  Pattern from_engine, to_client;
  uint32_t room;  // tokens it may still take
  double last_s;  // when the last one came, on the monotonic clock
  double max_gap_s = 0;            // since Python last looked
  Text text = {};
  uint32_t gaps_left = kMaxGaps;
  std::vector<double> gaps_s = {};  // between its first events, as far as Python has not looked at them
  std::vector<uint32_t> ids = {};   // given to the client since Python last looked
  std::string unread = {};         // read from the engine and not used, by Python to begin with
  std::string unsent = {};         // what the client has not taken; until it has, nothing is read
  Reason reason = kRunning;
};

// What Python is told of a lane. The pointers hold until the next look at any.
struct News {
  int32_t reason;
  uint32_t num_ids;
  const uint32_t* ids;
  uint32_t held_tokens;
  uint32_t num_unread;
  const char* unread;
  uint32_t num_unsent;
  const char* unsent;
  double last_s;
  double max_gap_s;
  uint32_t num_gaps;
  const double* gaps_s;
};

// What they point to: the lane itself goes on meanwhile.
struct Told {
  std::vector<uint32_t> ids;
  std::vector<double> gaps_s;
  std::string unread, unsent;
};

class FastPath {
 public:
  FastPath(Vocabulary vocabulary, std::chrono::microseconds nap)
      : vocabulary_(std::move(vocabulary)),
        nap_(nap),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        returned_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  ~FastPath() {
    if (!thread_.joinable()) return;
    signal(stop_);
    thread_.join();
  }

  // Starts the thread; false if the kernel has no descriptors left.
  bool start() {
    if (!epoll_.valid() || !stop_.valid() || !returned_.valid() || !watch(stop_, kStopSignal, EPOLLIN)) return false;
    SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
    return true;
  }

  // Readable while lanes that stopped by themselves have not been taken.
  int returned_fd() const { return returned_.fd(); }

  // Begins a lane; its number, or a negative errno.
  int64_t lend(std::unique_ptr<Lane> lane) {
    if (!lane->engine.valid() || !lane->client.valid()) return -EMFILE;
    if (lane->from_engine.bytes() + kMaxListBytes + kMaxFrameBytes > kReadBytes) return -EINVAL;
    std::lock_guard lock(mutex_);
    uint64_t number = ++last_number_;
    if (!watch(lane->engine, number, EPOLLIN)) return -errno;
    Lane& begun = *(lanes_[number] = std::move(lane));
    std::string unread = std::exchange(begun.unread, {});
    if (!unread.empty()) end_unless_running(begun, number, take_in(begun, number, unread));
    return int64_t(number);
  }

  // Numbers of lanes that stopped by themselves since the last call, at most `capacity` of them.
  int32_t take_returned(int64_t* numbers, int32_t capacity) {
    std::lock_guard lock(mutex_);
    int32_t count = 0;
    for (; count < capacity && !stopped_.empty(); ++count) {
      numbers[count] = int64_t(stopped_.back());
      stopped_.pop_back();
    }
    return count;
  }

  // What came since the last look; `stop` ends the lane. False if there is no such lane.
  bool look(uint64_t number, bool stop, News& news) {
    std::lock_guard lock(mutex_);
    auto found = lanes_.find(number);
    if (found == lanes_.end()) return false;
    Lane& lane = *found->second;
    if (stop) end(lane, kTakenBack);
    told_ = {std::exchange(lane.ids, {}), std::exchange(lane.gaps_s, {}), lane.unread, lane.unsent};
    news = {lane.reason,
            uint32_t(told_.ids.size()),
            told_.ids.data(),
            lane.text.held_tokens(),
            uint32_t(told_.unread.size()),
            told_.unread.data(),
            uint32_t(told_.unsent.size()),
            told_.unsent.data(),
            lane.last_s,
            std::exchange(lane.max_gap_s, 0),
            uint32_t(told_.gaps_s.size()),
            told_.gaps_s.data()};
    return true;
  }

  // A lane that has stopped is no more, and its copies of the sockets are closed.
  void forget(uint64_t number) {
    std::lock_guard lock(mutex_);
    lanes_.erase(number);
  }

 private:
  bool watch(const Descriptor& what, uint64_t number, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = number;
    return epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, what.fd(), &event) == 0;
  }

  void unwatch(const Descriptor& what) { epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, what.fd(), nullptr); }

  static void signal(const Descriptor& eventfd) {
    uint64_t one = 1;
    [[maybe_unused]] ssize_t written = write(eventfd.fd(), &one, sizeof one);
  }

  void run() {
    epoll_event events[kEventsPerTurn];
    for (;;) {
      int count = epoll_wait(epoll_.fd(), events, kEventsPerTurn, -1);
      for (int i = 0; i < count; ++i) {
        if (events[i].data.u64 == kStopSignal) return;
        serve(events[i].data.u64);
      }
      // Tokens that come meanwhile are served in one turn, which costs less than a turn for each.
      if (nap_.count() > 0) std::this_thread::sleep_for(nap_);
    }
  }

  // Does what a lane waits for: to read from its engine, or to write what its client has not taken yet.
  void serve(uint64_t number) {
    std::lock_guard lock(mutex_);
    auto found = lanes_.find(number);
    if (found == lanes_.end() || found->second->reason != kRunning) return;  // taken back a moment ago
    Lane& lane = *found->second;
    end_unless_running(lane, number, lane.unsent.empty() ? read_engine(lane, number) : write_rest(lane, number));
  }

  void end_unless_running(Lane& lane, uint64_t number, Reason reason) {
    if (reason == kRunning) return;
    end(lane, reason);
    stopped_.push_back(number);
    signal(returned_);
  }

  Reason read_engine(Lane& lane, uint64_t number) {
    size_t kept = lane.unread.size();
    std::memcpy(buffer_, lane.unread.data(), kept);
    ssize_t got = recv(lane.engine.fd(), buffer_ + kept, kReadBytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return kRunning;
    return got > 0 ? take_in(lane, number, {buffer_, kept + size_t(got)}) : kEngineClosed;
  }

  // Gives the client what it gets for the engine's bytes; those that are not used stay with the lane.
  Reason take_in(Lane& lane, uint64_t number, std::string_view data) {
    out_.clear();
    Reason reason = rewrite_all(lane, data);
    lane.unread.assign(data);
    if (out_.empty()) return reason;
    note_time(lane);
    Reason sent = send_out(lane, number, reason == kRunning);
    return sent == kRunning ? reason : sent;
  }

  // Appends what the client gets for the events that `data` begins with to `out_`; `data` is what remains.
  Reason rewrite_all(Lane& lane, std::string_view& data) {
    const size_t longest = lane.from_engine.bytes() + kMaxListBytes;
    for (Chunk chunk; !data.empty(); data.remove_prefix(chunk.bytes)) {
      Parsed parsed = parse_chunk(data, longest, chunk);
      if (parsed == Parsed::kCut) return kRunning;
      if (parsed == Parsed::kOther || !rewrite(lane, chunk.content)) return kOtherEvent;
    }
    return kRunning;
  }

  // Appends what the client gets for the engine's event to `out_`; false, with nothing done, if it is another.
  bool rewrite(Lane& lane, std::string_view event) {
    if (!lane.from_engine.matches(event) || !parse_ids(lane.from_engine.middle(event), event_ids_)) return false;
    if (event_ids_.size() > lane.room) return false;
    event_text_.clear();
    Text text = lane.text;
    for (uint32_t id : event_ids_)
      if (!text.feed(vocabulary_, id, event_text_)) return false;
    lane.text = std::move(text);
    lane.room -= uint32_t(event_ids_.size());
    lane.ids.insert(lane.ids.end(), event_ids_.begin(), event_ids_.end());
    append_hex(out_, lane.to_client.bytes() + event_text_.size());
    out_.append("\r\n").append(lane.to_client.before).append(event_text_).append(lane.to_client.after);
    out_.append("\r\n");
    return true;
  }

  static void note_time(Lane& lane) {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    double now_s = double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
    double gap_s = now_s - lane.last_s;
    lane.last_s = now_s;
    lane.max_gap_s = std::max(lane.max_gap_s, gap_s);
    if (lane.gaps_left == 0) return;
    lane.gaps_s.push_back(gap_s);
    --lane.gaps_left;
  }

  // Writes `out_`. If the client does not take all of it and the lane goes on, it waits for the client now.
  Reason send_out(Lane& lane, uint64_t number, bool goes_on) {
    size_t sent = 0;
    bool is_open = try_send(lane, out_, sent);
    lane.unsent.assign(out_, sent, std::string::npos);
    if (!is_open) return kClientClosed;
    if (lane.unsent.empty() || !goes_on) return kRunning;
    unwatch(lane.engine);
    return watch(lane.client, number, EPOLLOUT) ? kRunning : kClientClosed;
  }

  Reason write_rest(Lane& lane, uint64_t number) {
    size_t sent = 0;
    if (!try_send(lane, lane.unsent, sent)) return kClientClosed;
    lane.unsent.erase(0, sent);
    if (!lane.unsent.empty()) return kRunning;
    unwatch(lane.client);
    return watch(lane.engine, number, EPOLLIN) ? kRunning : kEngineClosed;
  }

  // False if nothing can be written any more.
  static bool try_send(const Lane& lane, std::string_view data, size_t& sent) {
    ssize_t result = send(lane.client.fd(), data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    sent = result < 0 ? 0 : size_t(result);
    return result >= 0 || errno == EAGAIN || errno == EINTR;
  }

  void end(Lane& lane, Reason reason) {
    if (lane.reason != kRunning) return;
    unwatch(lane.engine);
    unwatch(lane.client);
    lane.reason = reason;
  }

  const Vocabulary vocabulary_;
  const std::chrono::microseconds nap_;
  const Descriptor epoll_, stop_, returned_;
  std::thread thread_;

  std::mutex mutex_;  // guards what follows
  std::unordered_map<uint64_t, std::unique_ptr<Lane>> lanes_;
  std::vector<uint64_t> stopped_;
  uint64_t last_number_ = 0;
  Told told_;
  std::vector<uint32_t> event_ids_;
  std::string out_, event_text_;
  char buffer_[2 * kReadBytes];  // what is kept of an unfinished event, and what is read
};

}  // namespace pdd
