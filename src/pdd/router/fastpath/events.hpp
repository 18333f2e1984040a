// The events of a stream: HTTP chunks that differ in nothing but one part.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pdd {

constexpr size_t kMaxIdDigits = 9;
constexpr size_t kMaxHeadDigits = 6;
constexpr size_t kMaxFrameBytes = kMaxHeadDigits + 4;  // of a chunk, around its content

// What surrounds the only part of an event that changes.
struct Pattern {
  std::string before, after;

  size_t bytes() const { return before.size() + after.size(); }

  bool matches(std::string_view event) const {
    return event.size() > bytes() && event.substr(0, before.size()) == before &&
           event.substr(event.size() - after.size()) == after;
  }

  std::string_view middle(std::string_view event) const {
    return event.substr(before.size(), event.size() - bytes());
  }
};

enum class Parsed { kWhole, kCut, kOther };

inline int hex_value(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
  return -1;
}

struct Chunk {
  std::string_view content;
  size_t bytes = 0;  // with its head and end
};

// Finds the chunk that `data` begins with: whole, cut off, or nothing that is read here.
inline Parsed parse_chunk(std::string_view data, size_t max_bytes, Chunk& chunk) {
  size_t size = 0, at = 0;
  for (int value; at < data.size() && (value = hex_value(data[at])) >= 0; ++at) {
    if (at == kMaxHeadDigits) return Parsed::kOther;
    size = size * 16 + size_t(value);
  }
  if (at == data.size()) return Parsed::kCut;
  if (at == 0 || size == 0 || size > max_bytes || data[at] != '\r') return Parsed::kOther;
  chunk.bytes = at + 2 + size + 2;
  if (data.size() < chunk.bytes) return Parsed::kCut;
  chunk.content = data.substr(at + 2, size);
  bool is_framed = data[at + 1] == '\n' && data.substr(chunk.bytes - 2, 2) == "\r\n";
  return is_framed ? Parsed::kWhole : Parsed::kOther;
}

inline void append_hex(std::string& out, size_t value) {
  char digits[16];
  int count = 0;
  do {
    digits[count++] = "0123456789abcdef"[value % 16];
    value /= 16;
  } while (value);
  while (count) out.push_back(digits[--count]);
}

// The numbers of "12,7,1999"; false for anything else.
inline bool parse_ids(std::string_view list, std::vector<uint32_t>& ids) {
  ids.clear();
  uint32_t id = 0;
  size_t digits = 0;
  for (char character : list) {
    if (character == ',') {
      if (digits == 0) return false;
      ids.push_back(id);
      id = 0;
      digits = 0;
    } else {
      if (character < '0' || character > '9' || digits == kMaxIdDigits) return false;
      id = id * 10 + uint32_t(character - '0');
      ++digits;
    }
  }
  if (digits == 0) return false;
  ids.push_back(id);
  return true;
}

}  // namespace pdd
