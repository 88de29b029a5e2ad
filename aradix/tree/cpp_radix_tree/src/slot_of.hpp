// Where the instances of a Python class keep one of its `__slots__`: what the shell keeps in Python stays there, and is
// read here without asking Python for it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace aradix {

namespace nb = nanobind;

class SlotOf {
public:
    // Raises TypeError where that is no slot of the class.
    SlotOf(nb::handle type, const char *name);

    // Borrowed; null where it was never set. The caller knows that `owner` is an instance of the class.
    PyObject *get(PyObject *owner) const { return *place(owner); }
    void set(PyObject *owner, nb::object value) const {
        PyObject *old = *place(owner);
        *place(owner) = value.release().ptr();
        Py_XDECREF(old);
    }
    bool is(PyObject *owner, PyObject *value) const { return *place(owner) == value; }

    int64_t number(PyObject *owner) const {
        PyObject *value = *place(owner);
        if (value == nullptr)
            throw nb::attribute_error("a number was never set");
        int64_t number = PyLong_AsLongLong(value);
        if (number == -1 && PyErr_Occurred())
            throw nb::python_error();
        return number;
    }
    void add(PyObject *owner, int64_t count) const {
        if (count != 0)
            set(owner, nb::steal(PyLong_FromLongLong(number(owner) + count)));
    }

private:
    PyObject **place(PyObject *owner) const {
        return reinterpret_cast<PyObject **>(reinterpret_cast<char *>(owner) + offset_);
    }

    Py_ssize_t offset_;
};

// The fields of an aradix.keys.RadixKey.
struct KeySlots {
    explicit KeySlots(nb::handle type);

    SlotOf data, start, stop, item_bytes, num_items, name_space, hashes, bigrams;
};

// The fields of an aradix.cache.lease.Lease.
struct LeaseSlots {
    explicit LeaseSlots(nb::handle type);

    SlotOf cache, hold, reserve, forked, slots, slots_of, short_calls;
};

}  // namespace aradix
