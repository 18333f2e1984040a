// Tokens in the middle of an answer go from an engine's socket to the client's, on one thread without Python.
//
// A lane is such an answer. Its engine's events differ in nothing but token IDs, and what the client gets in
// nothing but text: both patterns are given when the lane is lent. Whatever is not of the pattern (a last
// token, an error, an added token, a client that reads slowly, a closed connection) is not touched: the lane
// stops before it, and its sockets go back to Python with the bytes that were read and not used.
//
// This file is the interface, in C and for ctypes (library.py); lanes.hpp is what it is about. Memory that
// runs out ends the process: in the middle of an answer nobody could say what its client has got.

#include "lanes.hpp"

extern "C" {

struct pdd_lane {
  int32_t engine_fd, client_fd;
  const char *engine_before, *engine_after, *client_before, *client_after;
  uint32_t num_engine_before, num_engine_after, num_client_before, num_client_after;
  uint32_t room;
  double last_s;
  const char* unread;
  uint32_t num_unread;
};

void* pdd_fastpath_open(const uint32_t* offsets, uint32_t num_tokens, const char* data, uint32_t nap_us) try {
  pdd::Vocabulary vocabulary{{offsets, offsets + num_tokens + 1}, {data, offsets[num_tokens]}};
  auto path = std::make_unique<pdd::FastPath>(std::move(vocabulary), std::chrono::microseconds(nap_us));
  return path->start() ? path.release() : nullptr;
} catch (...) {
  return nullptr;
}

void pdd_fastpath_close(void* path) noexcept { delete static_cast<pdd::FastPath*>(path); }

int pdd_fastpath_returned_fd(void* path) noexcept { return static_cast<pdd::FastPath*>(path)->returned_fd(); }

int64_t pdd_fastpath_lend(void* path, const pdd_lane* asked) noexcept {
  auto lane = std::unique_ptr<pdd::Lane>(new pdd::Lane{
      pdd::Descriptor::copy_of(asked->engine_fd),
      pdd::Descriptor::copy_of(asked->client_fd),
      {{asked->engine_before, asked->num_engine_before}, {asked->engine_after, asked->num_engine_after}},
      {{asked->client_before, asked->num_client_before}, {asked->client_after, asked->num_client_after}},
      asked->room,
      asked->last_s,
  });
  lane->unread.assign(asked->unread, asked->num_unread);
  return static_cast<pdd::FastPath*>(path)->lend(std::move(lane));
}

int32_t pdd_fastpath_take_returned(void* path, int64_t* lanes, int32_t capacity) noexcept {
  return static_cast<pdd::FastPath*>(path)->take_returned(lanes, capacity);
}

int32_t pdd_fastpath_look(void* path, int64_t lane, int32_t stop, pdd::News* news) noexcept {
  return static_cast<pdd::FastPath*>(path)->look(uint64_t(lane), stop != 0, *news) ? 0 : -ENOENT;
}

void pdd_fastpath_forget(void* path, int64_t lane) noexcept {
  static_cast<pdd::FastPath*>(path)->forget(uint64_t(lane));
}
}
