#include "python_records.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL ARADIX_ARRAY_API
#define NO_IMPORT_ARRAY
#include <numpy/arrayobject.h>

#include <limits>

namespace aradix {
namespace {

nb::object checked(PyObject *made) {
    if (made == nullptr)
        throw nb::python_error();
    return nb::steal(made);
}

nb::object interned(const char *name) { return checked(PyUnicode_InternFromString(name)); }

nb::object attribute(nb::handle of, const nb::object &name) { return checked(PyObject_GetAttr(of.ptr(), name.ptr())); }

nb::object shared(PyObject *borrowed) {
    if (borrowed == nullptr)
        throw nb::attribute_error("a key without its fields");
    return nb::borrow(borrowed);
}

Py_ssize_t size_attribute(nb::handle of, const nb::object &name) {
    nb::object value = attribute(of, name);
    Py_ssize_t size = PyLong_AsSsize_t(value.ptr());
    if (size == -1 && PyErr_Occurred())
        throw nb::python_error();
    return size;
}

}  // namespace

Records::Records()
    : key_type(nb::module_::import_("aradix.keys").attr("RadixKey")), key_slots(key_type) {
    nb::object protocol = nb::module_::import_("aradix.tree.protocol");
    match = protocol.attr("Match");
    freed = protocol.attr("Freed");
    inserted = protocol.attr("Inserted");
    detached = protocol.attr("Detached");
    closed = protocol.attr("Closed");
    node_view = protocol.attr("NodeView");
    share_view = protocol.attr("ShareView");
    glance = protocol.attr("Glance");
    on_device = interned("device");
    ready = protocol.attr("Ready");
    nowhere = protocol.attr("NOWHERE");
    node_ref = nb::borrow(nowhere.type());
    for (int gate = 0; gate < 4; ++gate)
        gates[gate] = protocol.attr("Gate")(gate);
    nb::object events = nb::module_::import_("aradix.events");
    block_stored = events.attr("BlockStored");
    block_removed = events.attr("BlockRemoved");
    all_blocks_cleared = events.attr("AllBlocksCleared");
    nothing = checked(PyTuple_New(0));
    no_streams = checked(PyFrozenSet_New(nullptr));
    npy_intp none = 0;
    no_slots = checked(PyArray_SimpleNew(1, &none, NPY_INT64));
    no_match = make(match, integer(0), integer(0), nowhere, integer(0), nothing, integer(0), nowhere, integer(0));
    no_latch = protocol.attr("Latch")(0);
    name_data = interned("data");
    name_start = interned("start");
    name_stop = interned("stop");
    name_item_bytes = interned("item_bytes");
    name_namespace = interned("namespace");
    name_node_id = interned("node_id");
    name_depth = interned("depth");
    name_rank = interned("rank");
    name_stream = interned("stream");
    name_sequence = interned("sequence");
    name_tenant = interned("tenant");
}

nb::object Records::ref(int64_t node_id, int64_t depth) const {
    return depth == 0 ? nowhere : make(node_ref, integer(node_id), integer(depth));
}

nb::object integer(int64_t value) { return checked(PyLong_FromLongLong(value)); }

nb::object bytes_of(const uint8_t *data, size_t size) {
    return checked(
        PyBytes_FromStringAndSize(reinterpret_cast<const char *>(data), static_cast<Py_ssize_t>(size)));
}

nb::object event_tokens(const uint8_t *tokens, size_t size, size_t item_bytes) {
    if (item_bytes == sizeof(int32_t))
        return bytes_of(tokens, size);
    // Of each pair the first token, of the last pair the second as well.
    std::vector<uint8_t> ids(size / 2 + sizeof(int32_t));
    size_t end = 0;
    for (size_t begin = 0; begin < size; begin += item_bytes, end += sizeof(int32_t))
        std::memcpy(ids.data() + end, tokens + begin, sizeof(int32_t));
    std::memcpy(ids.data() + end, tokens + size - sizeof(int32_t), sizeof(int32_t));
    return bytes_of(ids.data(), ids.size());
}

nb::object digest_list(const PageSpans &pages) {
    pages.hash();
    nb::list list;
    for (const PageSpan &span : pages.spans())
        for (uint32_t index = span.first; index < span.end(); ++index)
            append_to(list, bytes_of(span.run->digest(index).data(), sizeof(Digest)));
    return list;
}

void append_to(nb::list &list, const nb::object &item) {
    if (PyList_Append(list.ptr(), item.ptr()) != 0)
        throw nb::python_error();
}

Key::Key(const Records &records, nb::handle key, size_t page_size, size_t page_bytes, std::optional<int64_t> limit) {
    int64_t start, end, item_bytes;
    if (PyObject *object = key.ptr(); Py_TYPE(object) == reinterpret_cast<PyTypeObject *>(records.key_type.ptr())) {
        const KeySlots &slots = records.key_slots;
        data = shared(slots.data.get(object));
        name_space = shared(slots.name_space.get(object));
        start = slots.start.number(object);
        end = slots.stop.number(object);
        item_bytes = slots.item_bytes.number(object);
    } else {
        data = attribute(key, records.name_data);
        name_space = attribute(key, records.name_namespace);
        start = size_attribute(key, records.name_start);
        end = size_attribute(key, records.name_stop);
        item_bytes = size_attribute(key, records.name_item_bytes);
    }
    if (!PyBytes_Check(data.ptr()))
        throw nb::type_error("key.data must be bytes");
    if (start < 0 || end < start || end > PyBytes_GET_SIZE(data.ptr()) || item_bytes < 1)
        throw nb::value_error("the key's start and stop lie outside its data");
    int64_t num_tokens = (end - start) / item_bytes;
    if (limit.has_value() && *limit < num_tokens)
        num_tokens = *limit < 0 ? 0 : *limit;
    tokens = reinterpret_cast<const uint8_t *>(PyBytes_AS_STRING(data.ptr())) + start;
    size = static_cast<size_t>(end - start);
    stop = static_cast<size_t>(num_tokens) / page_size * page_bytes;
    if (stop > static_cast<size_t>(end - start))
        throw nb::value_error("the key has another item size than the tree");
}

Slots::Slots(nb::handle array)
    : owner(checked(PyArray_FROM_OTF(array.ptr(), NPY_INT64, NPY_ARRAY_IN_ARRAY))) {
    auto *slots = reinterpret_cast<PyArrayObject *>(owner.ptr());
    if (PyArray_NDIM(slots) != 1)
        throw nb::value_error("slots must have one dimension");
    data = static_cast<const int64_t *>(PyArray_DATA(slots));
    size = static_cast<size_t>(PyArray_SIZE(slots));
}

nb::object new_slots(size_t size, int64_t *&out) {
    auto length = static_cast<npy_intp>(size);
    nb::object array = checked(PyArray_SimpleNew(1, &length, NPY_INT64));
    out = static_cast<int64_t *>(PyArray_DATA(reinterpret_cast<PyArrayObject *>(array.ptr())));
    return array;
}

nb::object Records::checked_ready(nb::handle readies) const {
    if (!PyTuple_Check(readies.ptr()))
        throw nb::type_error("ready must be a tuple of Ready");
    Py_ssize_t count = PyTuple_GET_SIZE(readies.ptr());
    for (Py_ssize_t index = 0; index < count; ++index)
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(readies.ptr(), index), reinterpret_cast<PyTypeObject *>(ready.ptr())))
            throw nb::type_error("ready must be a tuple of Ready");
    return count == 0 ? nb::object() : nb::borrow(readies);
}

nb::object checked_streams(nb::handle streams) {
    if (!PyFrozenSet_Check(streams.ptr()))
        throw nb::type_error("streams must be a frozenset");
    return PySet_GET_SIZE(streams.ptr()) == 0 ? nb::object() : nb::borrow(streams);
}

int64_t saturated(nb::handle number) {
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0)
        return overflow > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
    if (value == -1 && PyErr_Occurred())
        throw nb::python_error();
    return value;
}

nb::object Records::newest_ready(const nb::object &first, const nb::object &second) const {
    if (!second.is_valid() || first.is(second))
        return first;
    if (!first.is_valid())
        return second;
    nb::object newest = checked(PyDict_New());
    for (const nb::object *readies : {&first, &second}) {
        for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(readies->ptr()); ++index) {
            nb::handle later = PyTuple_GET_ITEM(readies->ptr(), index);
            nb::object stream = attribute(later, name_stream);
            PyObject *known = PyDict_GetItemWithError(newest.ptr(), stream.ptr());
            if (known == nullptr && PyErr_Occurred())
                throw nb::python_error();
            if (known != nullptr && size_attribute(known, name_sequence) >= size_attribute(later, name_sequence))
                continue;
            if (PyDict_SetItem(newest.ptr(), stream.ptr(), later.ptr()) != 0)
                throw nb::python_error();
        }
    }
    nb::object values = checked(PyDict_Values(newest.ptr()));
    return checked(PyList_AsTuple(values.ptr()));
}

nb::object joined_streams(const nb::object &first, const nb::object &second) {
    if (!second.is_valid() || first.is(second))
        return first;
    if (!first.is_valid())
        return second;
    return checked(PyNumber_Or(first.ptr(), second.ptr()));
}

}  // namespace aradix
