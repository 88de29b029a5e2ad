// Methods of Python classes whose plain case is done here: `ShortMethod`, and the coroutine that one gives that waits.
//
// A ShortMethod stands in its class in the place of the function it was made of, and calls it for everything that is not
// plain: arguments by keyword, instances of subclasses, and whatever ShortCalls says no to.
#include "short_calls.hpp"
#include "tokens.hpp"

#include <structmember.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>

namespace aradix {
namespace {

constexpr size_t kMostArguments = 4;  // of `__aexit__`, with the lease

enum class Kind { key, lease, enter, allocate, commit, exit, release, finish, matched, tokens, slots };

struct Shape {
    const char *name;
    Kind kind;
    size_t least, most;  // arguments, with the instance
    bool waits;
};
constexpr Shape kShapes[] = {
    {"key", Kind::key, 2, 3, false},        {"lease", Kind::lease, 2, 2, false},
    {"enter", Kind::enter, 1, 1, true},     {"allocate", Kind::allocate, 2, 2, true},
    {"commit", Kind::commit, 2, 2, false},  {"exit", Kind::exit, 4, 4, true},
    {"release", Kind::release, 1, 1, false}, {"finish", Kind::finish, 1, 1, false},
    {"num_matched", Kind::matched, 1, 1, false}, {"num_tokens", Kind::tokens, 1, 1, false},
    {"slots", Kind::slots, 1, 1, false},
};

struct Method {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *slow;
    PyObject *fact;
    PyObject *dict;
    PyObject *owner;  // the class it stands in; null until it does
    PyTypeObject *coroutine_type;
    const Shape *shape;
    std::optional<LeaseSlots> lease_slots;
    std::optional<KeySlots> key_slots;
    std::optional<nb::object> attribute;  // under which a cache has its ShortCalls
};

// A call that was made and may not have begun: it begins when it is first awaited.
struct Coroutine {
    PyObject_HEAD
    Method *method;
    PyObject *inner;  // what goes on where the call is not plain
    PyObject *arguments[kMostArguments];
    uint8_t num_arguments;
    bool begun, over;
};

template <class Result, class Call> Result guarded(Result failed, Call call) {
    try {
        return call();
    } catch (nb::python_error &error) {
        error.restore();
    } catch (nb::builtin_exception &error) {
        bool is_type = error.type() == nb::exception_type::type_error;
        bool is_value = error.type() == nb::exception_type::value_error;
        PyErr_SetString(is_type ? PyExc_TypeError : is_value ? PyExc_ValueError : PyExc_AttributeError, error.what());
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return failed;
}

// ---- the plain cases: a result, or null where it is not plain ----

nb::object make_key(Method &method, PyObject *const *arguments, size_t count) {
    PyObject *key = arguments[0], *default_space = method.fact;
    PyObject *space = count == 3 && arguments[2] != Py_None ? arguments[2] : default_space;
    if (Py_TYPE(space) != Py_TYPE(default_space))
        return nb::object();
    nb::object data = pack_tokens(arguments[1]);
    if (data.is_none() || PyBytes_GET_SIZE(data.ptr()) == 0)
        return nb::object();
    const KeySlots &slots = *method.key_slots;
    auto size = static_cast<int64_t>(PyBytes_GET_SIZE(data.ptr()));
    constexpr auto kTokenBytes = static_cast<int64_t>(sizeof(int32_t));
    slots.data.set(key, std::move(data));
    slots.start.set(key, integer(0));
    slots.stop.set(key, integer(size));
    slots.item_bytes.set(key, integer(kTokenBytes));
    slots.num_items.set(key, integer(size / kTokenBytes));
    slots.name_space.set(key, nb::borrow(space));
    slots.hashes.set(key, nb::none());
    slots.bigrams.set(key, nb::none());
    return nb::none();
}

ShortCalls *calls_of(PyObject *object) {
    // It is there, or None is: nothing else is ever put there.
    return object == nullptr || object == Py_None ? nullptr : nb::inst_ptr<ShortCalls>(object);
}

nb::object new_lease(Method &method, PyObject *const *arguments) {
    nb::object found = nb::steal(PyObject_GetAttr(arguments[0], method.attribute->ptr()));
    if (!found.is_valid())
        throw nb::python_error();
    ShortCalls *calls = calls_of(found.ptr());
    return calls == nullptr ? nb::object() : calls->new_lease(found, arguments[0], arguments[1]);
}

nb::object call_lease(Method &method, PyObject *const *arguments) {
    PyObject *lease = arguments[0];
    const LeaseSlots &slots = *method.lease_slots;
    ShortCalls *calls = calls_of(slots.short_calls.get(lease));
    PyObject *hold = slots.hold.get(lease);
    if (calls == nullptr || hold == nullptr)
        return nb::object();
    bool done = false;
    switch (method.shape->kind) {
    case Kind::enter:
        done = slots.forked.is(lease, Py_False) && slots.reserve.is(lease, Py_None) && calls->enter(hold);
        return done ? nb::borrow(lease) : nb::object();
    case Kind::allocate:
        done = calls->grow(hold, arguments[1]);
        break;
    case Kind::commit:
        return calls->publish(hold, arguments[1]);
    case Kind::exit:
        done = arguments[1] == Py_None && calls->leave(hold);
        break;
    case Kind::release:
        done = calls->leave(hold);
        break;
    case Kind::matched:
    case Kind::tokens: {
        const Hold *plain = calls->plain_hold(hold);
        if (plain == nullptr)
            return nb::object();
        return integer(method.shape->kind == Kind::matched ? plain->num_matched : plain->num_tokens());
    }
    case Kind::slots:
        return calls->slots(lease, hold);
    default:
        done = calls->is_over(hold);
    }
    return done ? nb::none() : nb::object();
}

// A new reference; null without an exception where it is not plain.
PyObject *plain_result(Method &method, PyObject *const *arguments, size_t count) {
    return guarded<PyObject *>(nullptr, [&] {
        Kind kind = method.shape->kind;
        nb::object result = kind == Kind::key     ? make_key(method, arguments, count)
                            : kind == Kind::lease ? new_lease(method, arguments)
                                                  : call_lease(method, arguments);
        return result.release().ptr();
    });
}

// ---- ShortMethod ----

bool is_plain_call(const Method &method, PyObject *const *arguments, size_t count, PyObject *names) {
    return names == nullptr && count >= method.shape->least && count <= method.shape->most &&
           reinterpret_cast<PyObject *>(Py_TYPE(arguments[0])) == method.owner;
}

PyObject *new_coroutine(Method *method, PyObject *const *arguments, size_t count) {
    auto *made = PyObject_GC_New(Coroutine, method->coroutine_type);
    if (made == nullptr)
        return nullptr;
    made->method = reinterpret_cast<Method *>(Py_NewRef(reinterpret_cast<PyObject *>(method)));
    made->inner = nullptr;
    for (size_t index = 0; index < kMostArguments; ++index)
        made->arguments[index] = index < count ? Py_NewRef(arguments[index]) : nullptr;
    made->num_arguments = static_cast<uint8_t>(count);
    made->begun = made->over = false;
    PyObject_GC_Track(made);
    return reinterpret_cast<PyObject *>(made);
}

PyObject *call_method(PyObject *self, PyObject *const *arguments, size_t flagged, PyObject *names) {
    auto *method = reinterpret_cast<Method *>(self);
    auto count = static_cast<size_t>(PyVectorcall_NARGS(flagged));
    if (is_plain_call(*method, arguments, count, names)) {
        if (method->shape->waits)
            return new_coroutine(method, arguments, count);
        PyObject *result = plain_result(*method, arguments, count);
        if (result != nullptr || PyErr_Occurred())
            return result;
    }
    return PyObject_Vectorcall(method->slow, arguments, flagged, names);
}

PyObject *make_method(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    const char *keywords[] = {"kind", "slow", "fact", nullptr};
    const char *kind = nullptr;
    PyObject *slow = nullptr, *fact = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "sO|O", const_cast<char **>(keywords), &kind, &slow, &fact))
        return nullptr;
    const Shape *shape = nullptr;
    for (const Shape &known : kShapes)
        if (std::strcmp(known.name, kind) == 0)
            shape = &known;
    if (shape == nullptr)
        return PyErr_Format(PyExc_ValueError, "no plain case is known by the name of %s", kind);
    PyObject *module = PyType_GetModule(type);
    PyObject *coroutine_type = module == nullptr ? nullptr : PyObject_GetAttrString(module, "ShortCoroutine");
    if (coroutine_type == nullptr)
        return nullptr;
    auto *method = reinterpret_cast<Method *>(type->tp_alloc(type, 0));
    if (method == nullptr) {
        Py_DECREF(coroutine_type);
        return nullptr;
    }
    method->call = call_method;
    method->slow = Py_NewRef(slow);
    method->fact = Py_NewRef(fact);
    method->coroutine_type = reinterpret_cast<PyTypeObject *>(coroutine_type);
    method->shape = shape;
    new (&method->lease_slots) std::optional<LeaseSlots>();
    new (&method->key_slots) std::optional<KeySlots>();
    new (&method->attribute) std::optional<nb::object>();
    return reinterpret_cast<PyObject *>(method);
}

PyObject *set_name(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    auto *method = reinterpret_cast<Method *>(self);
    return guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        if (count != 2 || !PyType_Check(arguments[0]) || method->owner != nullptr)
            throw nb::type_error("a method stands in one class, where that is made");
        if (method->shape->kind == Kind::key)
            method->key_slots.emplace(arguments[0]);
        else if (method->shape->kind == Kind::lease)
            method->attribute = nb::steal(PyUnicode_InternFromString("_short_calls"));
        else
            method->lease_slots.emplace(arguments[0]);
        method->owner = Py_NewRef(arguments[0]);
        return Py_NewRef(Py_None);
    });
}

PyObject *bind_method(PyObject *self, PyObject *instance, PyObject *) {
    return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

int traverse_method(PyObject *self, visitproc visit, void *arg) {
    auto *method = reinterpret_cast<Method *>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(method->slow);
    Py_VISIT(method->fact);
    Py_VISIT(method->dict);
    Py_VISIT(method->owner);
    Py_VISIT(method->coroutine_type);
    return 0;
}

int clear_method(PyObject *self) {
    // `slow` stays: a class under collection may still be called. The function's own links are cleared instead.
    auto *method = reinterpret_cast<Method *>(self);
    Py_CLEAR(method->dict);
    Py_CLEAR(method->owner);
    return 0;
}

void free_method(PyObject *self) {
    auto *method = reinterpret_cast<Method *>(self);
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_method(self);
    Py_XDECREF(method->slow);
    Py_XDECREF(method->fact);
    Py_XDECREF(method->coroutine_type);
    std::destroy_at(&method->lease_slots);
    std::destroy_at(&method->key_slots);
    std::destroy_at(&method->attribute);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMethodDef method_methods[] = {
    {"__set_name__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(set_name)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef method_members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, nullptr},
                                {"__dictoffset__", T_PYSSIZET, offsetof(Method, dict), READONLY, nullptr},
                                {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef method_properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                                   {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot method_slots[] = {{Py_tp_new, reinterpret_cast<void *>(make_method)},
                              {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
                              {Py_tp_descr_get, reinterpret_cast<void *>(bind_method)},
                              {Py_tp_methods, method_methods},
                              {Py_tp_members, method_members},
                              {Py_tp_getset, method_properties},
                              {Py_tp_traverse, reinterpret_cast<void *>(traverse_method)},
                              {Py_tp_clear, reinterpret_cast<void *>(clear_method)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(free_method)},
                              {0, nullptr}};
PyType_Spec method_spec = {"aradix._native.ShortMethod", sizeof(Method), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                               Py_TPFLAGS_METHOD_DESCRIPTOR,
                           method_slots};

// ---- its coroutine ----

Coroutine *coroutine(PyObject *self) { return reinterpret_cast<Coroutine *>(self); }

void drop_arguments(Coroutine *call) {
    for (PyObject *&argument : call->arguments)
        Py_CLEAR(argument);
}

// Something that the plain case calls may reach for the coroutine that it belongs to.
bool is_running(const Coroutine *call) {
    if (!call->begun || call->over || call->inner != nullptr)
        return false;
    PyErr_SetString(PyExc_ValueError, "coroutine already executing");
    return true;
}

// Make the coroutine of the function in Python; it has not begun then.
bool go_slowly(Coroutine *call) {
    call->begun = true;
    call->inner = PyObject_Vectorcall(call->method->slow, call->arguments, call->num_arguments, nullptr);
    drop_arguments(call);
    call->over = call->inner == nullptr;
    return !call->over;
}

PySendResult send_value(PyObject *self, PyObject *value, PyObject **result) {
    Coroutine *call = coroutine(self);
    *result = nullptr;
    if (call->over) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return PYGEN_ERROR;
    }
    if (is_running(call))
        return PYGEN_ERROR;
    if (!call->begun) {
        if (value != Py_None) {
            PyErr_SetString(PyExc_TypeError, "can't send non-None value to a just-started coroutine");
            return PYGEN_ERROR;
        }
        call->begun = true;
        *result = plain_result(*call->method, call->arguments, call->num_arguments);
        if (*result != nullptr || PyErr_Occurred()) {
            call->over = true;
            PyObject *type, *error, *trace;
            PyErr_Fetch(&type, &error, &trace);
            drop_arguments(call);
            PyErr_Restore(type, error, trace);
            return *result != nullptr ? PYGEN_RETURN : PYGEN_ERROR;
        }
        if (!go_slowly(call))
            return PYGEN_ERROR;
    }
    PySendResult sent = PyIter_Send(call->inner, value, result);
    call->over = sent != PYGEN_NEXT;
    return sent;
}

PyObject *send(PyObject *self, PyObject *value) {
    PyObject *result = nullptr;
    PySendResult sent = send_value(self, value, &result);
    if (sent != PYGEN_RETURN)
        return result;
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    Py_DECREF(result);
    if (stop != nullptr) {
        PyErr_SetObject(PyExc_StopIteration, stop);
        Py_DECREF(stop);
    }
    return nullptr;
}

PyObject *next_value(PyObject *self) { return send(self, Py_None); }

PyObject *throw_error(PyObject *self, PyObject *arguments) {
    Coroutine *call = coroutine(self);
    if (call->over) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return nullptr;
    }
    if (is_running(call) || (!call->begun && !go_slowly(call)))
        return nullptr;
    nb::object thrower = nb::steal(PyObject_GetAttrString(call->inner, "throw"));
    PyObject *result = thrower.is_valid() ? PyObject_Call(thrower.ptr(), arguments, nullptr) : nullptr;
    call->over = result == nullptr;
    return result;
}

PyObject *close_call(PyObject *self, PyObject *) {
    Coroutine *call = coroutine(self);
    if (is_running(call))
        return nullptr;
    call->begun = call->over = true;
    drop_arguments(call);
    if (call->inner == nullptr)
        return Py_NewRef(Py_None);
    return PyObject_CallMethod(call->inner, "close", nullptr);
}

PyObject *await_call(PyObject *self) { return Py_NewRef(self); }

PyObject *name_of(PyObject *self, void *name) {
    return PyObject_GetAttrString(reinterpret_cast<PyObject *>(coroutine(self)->method), static_cast<char *>(name));
}

int traverse_call(PyObject *self, visitproc visit, void *arg) {
    Coroutine *call = coroutine(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(call->method);
    Py_VISIT(call->inner);
    for (PyObject *argument : call->arguments)
        Py_VISIT(argument);
    return 0;
}

int clear_call(PyObject *self) {
    coroutine(self)->over = true;
    drop_arguments(coroutine(self));
    Py_CLEAR(coroutine(self)->inner);
    return 0;
}

void warn_unawaited(PyObject *self) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *name = name_of(self, const_cast<char *>("__qualname__"));
    if (name == nullptr || PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine '%S' was never awaited", name) != 0)
        PyErr_WriteUnraisable(name);
    Py_XDECREF(name);
    PyErr_Restore(type, error, trace);
}

void free_call(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (!coroutine(self)->begun)
        warn_unawaited(self);
    clear_call(self);
    Py_DECREF(coroutine(self)->method);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

PyMethodDef call_methods[] = {{"send", send, METH_O, nullptr},
                              {"throw", throw_error, METH_VARARGS, nullptr},
                              {"close", close_call, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyGetSetDef call_properties[] = {
    {"__name__", name_of, nullptr, nullptr, const_cast<char *>("__name__")},
    {"__qualname__", name_of, nullptr, nullptr, const_cast<char *>("__qualname__")},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot call_slots[] = {{Py_am_await, reinterpret_cast<void *>(await_call)},
                            {Py_am_send, reinterpret_cast<void *>(send_value)},
                            {Py_tp_iter, reinterpret_cast<void *>(await_call)},
                            {Py_tp_iternext, reinterpret_cast<void *>(next_value)},
                            {Py_tp_methods, call_methods},
                            {Py_tp_getset, call_properties},
                            {Py_tp_traverse, reinterpret_cast<void *>(traverse_call)},
                            {Py_tp_clear, reinterpret_cast<void *>(clear_call)},
                            {Py_tp_dealloc, reinterpret_cast<void *>(free_call)},
                            {0, nullptr}};
PyType_Spec call_spec = {"aradix._native.ShortCoroutine", sizeof(Coroutine), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots};

}  // namespace

void add_short_methods(nb::module_ &module) {
    const std::pair<const char *, PyType_Spec *> specs[] = {{"ShortMethod", &method_spec},
                                                            {"ShortCoroutine", &call_spec}};
    for (auto [name, spec] : specs) {
        nb::object type = nb::steal(PyType_FromModuleAndSpec(module.ptr(), spec, nullptr));
        if (!type.is_valid())
            throw nb::python_error();
        module.attr(name) = type;
    }
}

}  // namespace aradix
