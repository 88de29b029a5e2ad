#include "tokens.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL ARADIX_ARRAY_API
#define NO_IMPORT_ARRAY
#include <numpy/arrayobject.h>

#include <cstdint>
#include <cstring>

namespace aradix {
namespace {

// A C buffer of the caller's, given back on any way out.
class View {
public:
    explicit View(nb::handle object) {
        held_ = PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_ND | PyBUF_FORMAT) == 0;
        if (!held_)
            PyErr_Clear();
    }
    ~View() {
        if (held_)
            PyBuffer_Release(&buffer_);
    }
    View(const View &) = delete;
    View &operator=(const View &) = delete;

    // The letter of a flat run of plain integers, else 0.
    char kind() const {
        if (!held_ || buffer_.ndim != 1 || buffer_.format == nullptr || buffer_.format[0] == 0 || buffer_.format[1] != 0)
            return 0;
        return buffer_.format[0];
    }
    Py_ssize_t item_size() const { return buffer_.itemsize; }
    Py_ssize_t size() const { return buffer_.shape[0]; }
    const void *data() const { return buffer_.buf; }

private:
    Py_buffer buffer_;
    bool held_;
};

nb::object new_bytes(Py_ssize_t num_tokens, int32_t *&out) {
    PyObject *bytes = PyBytes_FromStringAndSize(nullptr, num_tokens * static_cast<Py_ssize_t>(sizeof(int32_t)));
    if (bytes == nullptr)
        throw nb::python_error();
    out = reinterpret_cast<int32_t *>(PyBytes_AS_STRING(bytes));
    return nb::steal(bytes);
}

// Long prompts come at every turn, so the loop is built for wide registers too, where the compiler and loader can choose.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define ARADIX_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define ARADIX_WIDE
#endif

// Copies; the union of all bits, which tells whether an id was negative or too large.
ARADIX_WIDE uint32_t copy_narrow(const int32_t *ids, Py_ssize_t count, int32_t *out) {
    uint32_t all = 0;
    for (Py_ssize_t index = 0; index < count; ++index) {
        all |= static_cast<uint32_t>(ids[index]);
        out[index] = ids[index];
    }
    return all;
}

ARADIX_WIDE uint64_t copy_wide(const int64_t *ids, Py_ssize_t count, int32_t *out) {
    uint64_t all = 0;
    for (Py_ssize_t index = 0; index < count; ++index) {
        all |= static_cast<uint64_t>(ids[index]);
        out[index] = static_cast<int32_t>(ids[index]);
    }
    return all;
}

nb::object pack_narrow(const int32_t *ids, Py_ssize_t count) {
    int32_t *out = nullptr;
    nb::object bytes = new_bytes(count, out);
    return copy_narrow(ids, count, out) > INT32_MAX ? nb::none() : bytes;
}

nb::object pack_wide(const int64_t *ids, Py_ssize_t count) {
    int32_t *out = nullptr;
    nb::object bytes = new_bytes(count, out);
    return copy_wide(ids, count, out) > INT32_MAX ? nb::none() : bytes;
}

// An int below 2^30 without a call: most of them are token ids. Negative for all others.
inline int64_t small_id(PyObject *item) {
#if PY_VERSION_HEX >= 0x030C0000
    auto *number = reinterpret_cast<PyLongObject *>(item);
    return PyUnstable_Long_IsCompact(number) ? PyUnstable_Long_CompactValue(number) : -1;
#else
    Py_ssize_t size = Py_SIZE(item);
    if (size == 1)
        return reinterpret_cast<PyLongObject *>(item)->ob_digit[0];
    return size == 0 ? 0 : -1;
#endif
}

nb::object pack_items(PyObject *const *items, Py_ssize_t count) {
    int32_t *out = nullptr;
    nb::object bytes = new_bytes(count, out);
    for (Py_ssize_t index = 0; index < count; ++index) {
        if (!PyLong_CheckExact(items[index]))
            return nb::none();
        int64_t id = small_id(items[index]);
        if (id < 0) {
            int overflow = 0;
            id = PyLong_AsLongAndOverflow(items[index], &overflow);
            if (overflow != 0 || id < 0)
                return nb::none();
        }
        if (id > INT32_MAX)
            return nb::none();
        out[index] = static_cast<int32_t>(id);
    }
    return bytes;
}

// Through numpy's own door: its buffers take longer to ask for than a short prompt to copy.
nb::object pack_array(PyArrayObject *ids) {
    if (PyArray_NDIM(ids) != 1 || !PyArray_ISCARRAY_RO(ids))
        return nb::none();
    int type = PyArray_TYPE(ids);
    auto size = static_cast<size_t>(PyArray_ITEMSIZE(ids));
    Py_ssize_t count = PyArray_SIZE(ids);
    if (type != NPY_INT && type != NPY_LONG && type != NPY_LONGLONG)
        return nb::none();
    if (size == sizeof(int32_t))
        return pack_narrow(static_cast<const int32_t *>(PyArray_DATA(ids)), count);
    return pack_wide(static_cast<const int64_t *>(PyArray_DATA(ids)), count);
}

}  // namespace

nb::object pack_tokens(nb::handle token_ids) {
    PyObject *ids = token_ids.ptr();
    if (PyList_CheckExact(ids) || PyTuple_CheckExact(ids))
        return pack_items(PySequence_Fast_ITEMS(ids), PySequence_Fast_GET_SIZE(ids));
    if (PyArray_CheckExact(ids))
        return pack_array(reinterpret_cast<PyArrayObject *>(ids));
    if (!PyObject_CheckBuffer(ids))
        return nb::none();
    View view(token_ids);
    char kind = view.kind();
    if (kind == 'i' && view.item_size() == sizeof(int32_t))
        return pack_narrow(static_cast<const int32_t *>(view.data()), view.size());
    if ((kind == 'l' || kind == 'q') && view.item_size() == sizeof(int64_t))
        return pack_wide(static_cast<const int64_t *>(view.data()), view.size());
    if (kind == 'l' && view.item_size() == sizeof(int32_t))
        return pack_narrow(static_cast<const int32_t *>(view.data()), view.size());
    return nb::none();
}

}  // namespace aradix
