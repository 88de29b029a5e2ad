#include "msgpack_ints.hpp"

#include <cstdint>
#include <cstring>

namespace aradix {
namespace {

constexpr size_t kMostHeaderBytes = 5;

// `size` bytes of a number, the highest first.
uint8_t *write_big_endian(uint8_t *out, uint64_t value, size_t size) {
    for (size_t index = size; index-- != 0; value >>= 8)
        out[index] = static_cast<uint8_t>(value);
    return out + size;
}

uint8_t *write_array_header(uint8_t *out, size_t count) {
    if (count < 16) {
        *out = static_cast<uint8_t>(0x90 | count);
        return out + 1;
    }
    bool is_short = count <= UINT16_MAX;
    *out = is_short ? 0xdc : 0xdd;
    return write_big_endian(out + 1, count, is_short ? 2 : 4);
}

// In as few bytes as it takes.
uint8_t *write_number(uint8_t *out, uint64_t value) {
    if (value < 0x80) {
        *out = static_cast<uint8_t>(value);
        return out + 1;
    }
    int size_class = (value > UINT8_MAX) + (value > UINT16_MAX) + (value > UINT32_MAX);
    *out = static_cast<uint8_t>(0xcc + size_class);
    return write_big_endian(out + 1, value, size_t{1} << size_class);
}

template <class Number, class Value> nb::object msgpack_array(const nb::bytes &numbers, Value value) {
    size_t count = numbers.size() / sizeof(Number);
    if (numbers.size() % sizeof(Number) != 0 || count > UINT32_MAX)
        throw nb::value_error("these are no whole numbers, or too many");
    PyObject *made = PyBytes_FromStringAndSize(
        nullptr, static_cast<Py_ssize_t>(kMostHeaderBytes + count * (1 + sizeof(Number))));
    if (made == nullptr)
        throw nb::python_error();
    auto *begin = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(made));
    uint8_t *out = write_array_header(begin, count);
    for (size_t index = 0; index < count; ++index) {
        Number number;
        std::memcpy(&number, numbers.c_str() + index * sizeof(Number), sizeof(Number));
        out = write_number(out, value(number));
    }
    if (_PyBytes_Resize(&made, out - begin) != 0)
        throw nb::python_error();
    return nb::steal(made);
}

}  // namespace

nb::object msgpack_ids(nb::bytes tokens) {
    return msgpack_array<uint32_t>(tokens, [](uint32_t id) { return id; });
}

nb::object msgpack_hashes(nb::bytes hashes) {
    return msgpack_array<uint64_t>(hashes, [](uint64_t hash) { return __builtin_bswap64(hash); });
}

}  // namespace aradix
