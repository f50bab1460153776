// SPDX-License-Identifier: Apache-2.0
// The short way of a call: from the arguments as a user gave them to the result, in one call from Python.
//
// For a short row, Python takes longer to look at the arguments than the row takes. So ShortCalls looks at them here, and
// keeps the prepared request of each layout that it was told of. It serves a call only if all of this is so, and else
// returns None, whereupon Python checks the arguments one by one:
//   - Arrays have exactly the array type, lie on the CPU, and the framework need not see the call.
//   - The layout of the arrays and the other arguments are those of a call that has passed the checks.
//   - What may change within a layout is right: the temperatures are positive and finite, and `out` is contiguous
//     arrays of the result's shapes and dtypes which overlap no other.
//
// It knows no framework: arrays are read by DLPack, and what it must call is passed to it.
#include "short_calls.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kept_calls.h"
#include "prepared.h"
#include "shares.h"

namespace fused_topk::cpu {
namespace {

struct TopkArrays {
  Array logits, temperature, mask, values, indices, logsumexp;
};

// What ShortCalls must know of the framework.
struct Framework {
  nb::object array_type;
  // A subclass of tuple, for the results of top-k.
  nb::object result_type;
  // Made with (size=, dtype=, device=), or like another array, which takes less time.
  nb::object empty;
  nb::object empty_like;
  // How many threads a call may use.
  nb::object num_threads;
  // Whether an array is one that is not always to be written; and what is called with the arrays that have been.
  nb::object is_inference;
  nb::object have_changed;
  // An array's, and the thread's: an object whose raw_repr() is a set of bits. With any bit but the known ones, the
  // framework must see the call.
  nb::object keys_of_array;
  nb::object keys_of_thread;
  u64 known_of_array;
  u64 known_of_thread;
  // Whether gradients are recorded; and the module whose _current_level is negative outside of forward-mode
  // differentiation.
  nb::object records_gradients;
  nb::object forward_mode;
};

class ShortCalls {
 public:
  explicit ShortCalls(Framework framework) : framework_(std::move(framework)) {
    const nb::object capsule = framework_.array_type.attr("__dlpack_c_exchange_api__");
    api_ = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
    if (!api_) throw nb::python_error();
    if (api_->major != dlpack::kMajorVersion || !api_->from_object) {
      throw std::invalid_argument("this version of DLPack's C interface is not known");
    }
  }

  nb::object topk(nb::handle values, nb::handle logits, nb::handle k, nb::handle dim, nb::handle temperature,
                  nb::handle mask, nb::handle normalize, nb::handle backend, nb::handle out) const {
    TopkArrays arrays;
    Key key;
    nb::handle fields[3];
    if (!(out.is_none() || take_fields(out, fields)) ||
        !read_topk(values, logits, k, dim, temperature, mask, normalize, backend, fields, arrays, key)) {
      return nb::none();
    }
    const auto kept = topk_.find(key);
    if (!kept) return nb::none();
    const Topk& run = *kept->request;
    const Problem& request = run.request();
    const bool has_temperatures = !temperature_is_number(temperature);
    if (has_temperatures && !are_temperatures(arrays.temperature)) return nb::none();

    nb::object result;
    bool has_small_indices = false;
    if (out.is_none()) {
      nb::object made[3];
      for (u32 i = 0; i < 3; ++i) made[i] = new_array(*kept, i);
      if (!read(made[0], arrays.values) || !read(made[1], arrays.indices) || !read(made[2], arrays.logsumexp)) {
        return nb::none();
      }
      result = result_of(nb::make_tuple(made[0], made[1], made[2]));
    } else {
      has_small_indices = has_type(arrays.indices, dlpack::kInt, 32);
      if (!is_plain_out(arrays, request, has_temperatures, !mask.is_none())) return nb::none();
      for (const nb::handle field : fields) {
        if (call(framework_.is_inference, field).ptr() != Py_False) return nb::none();
      }
      const bool is_result = Py_TYPE(out.ptr()) == reinterpret_cast<PyTypeObject*>(framework_.result_type.ptr());
      result = is_result ? nb::borrow(out) : result_of(nb::borrow(out));
    }

    // int64 indices that the caller wants as int32. They are below the vocabulary's size.
    std::vector<i64> indices(has_small_indices ? elements_of(arrays.indices) : 0);
    run(address(arrays.logits), address(arrays.values),
        has_small_indices ? reinterpret_cast<std::uintptr_t>(indices.data()) : address(arrays.indices),
        address(arrays.logsumexp), 0, mask.is_none() ? 0 : address(arrays.mask),
        has_temperatures ? address(arrays.temperature) : 0, threads_for(arrays.logits));
    std::copy(indices.begin(), indices.end(), static_cast<std::int32_t*>(arrays.indices.data));
    if (!out.is_none()) call(framework_.have_changed, result);
    return result;
  }

  // After a call with these arguments has passed all checks: serves such calls from then on by the request.
  nb::object keep_topk(nb::handle values, nb::handle logits, nb::handle k, nb::handle dim, nb::handle temperature,
                       nb::handle mask, nb::handle normalize, nb::handle backend, nb::handle request,
                       nb::handle results) const {
    TopkArrays arrays;
    Key key;
    const nb::handle out[3];
    if (read_topk(values, logits, k, dim, temperature, mask, normalize, backend, out, arrays, key)) {
      topk_.keep(kept<Topk>(key, request, logits, results, {values, normalize, backend}));
    }
    return nb::none();
  }

  nb::object full_rows(nb::handle values, nb::handle logits, nb::handle dim, nb::handle temperature, nb::handle dtype,
                       nb::handle backend) const {
    Array rows, temperatures, written;
    Key key;
    if (!read_full_rows(values, logits, dim, temperature, dtype, backend, rows, temperatures, key)) return nb::none();
    const auto kept = full_rows_.find(key);
    if (!kept) return nb::none();
    const bool has_temperatures = !temperature_is_number(temperature);
    if (has_temperatures && !are_temperatures(temperatures)) return nb::none();
    // No sizes: the result is like the logits. `empty_like` takes less time than `empty`.
    nb::object result = kept->results.empty() ? like(logits) : new_array(*kept, 0);
    if (!read(result, written)) return nb::none();
    (*kept->request)(address(rows), address(written), has_temperatures ? address(temperatures) : 0, threads_for(rows));
    return result;
  }

  nb::object keep_full_rows(nb::handle values, nb::handle logits, nb::handle dim, nb::handle temperature,
                            nb::handle dtype, nb::handle backend, nb::handle request, nb::handle results) const {
    Array rows, temperatures;
    Key key;
    if (read_full_rows(values, logits, dim, temperature, dtype, backend, rows, temperatures, key)) {
      full_rows_.keep(kept<FullRows>(key, request, logits, results, {values, dtype, backend}));
    }
    return nb::none();
  }

 private:
  bool is_array(nb::handle object) const {
    return Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(framework_.array_type.ptr());
  }

  static bool temperature_is_number(nb::handle temperature) {
    return temperature.is_none() || PyFloat_CheckExact(temperature.ptr()) || PyLong_CheckExact(temperature.ptr());
  }

  // `out` as its three arrays.
  bool take_fields(nb::handle out, nb::handle (&fields)[3]) const {
    const PyTypeObject* const type = Py_TYPE(out.ptr());
    if (type != &PyTuple_Type && type != reinterpret_cast<PyTypeObject*>(framework_.result_type.ptr())) return false;
    if (PyTuple_Size(out.ptr()) != 3) return false;
    for (u32 i = 0; i < 3; ++i) {
      fields[i] = PyTuple_GetItem(out.ptr(), Py_ssize_t(i));
      if (!is_array(fields[i])) return false;
    }
    return true;
  }

  // Reads the arguments that are no arrays, and the arrays themselves. False: an argument is not exactly known.
  bool read_topk(nb::handle values, nb::handle logits, nb::handle k, nb::handle dim, nb::handle temperature,
                 nb::handle mask, nb::handle normalize, nb::handle backend, const nb::handle (&out)[3],
                 TopkArrays& arrays, Key& key) const {
    const bool has_mask = !mask.is_none();
    const bool has_temperatures = !temperature_is_number(temperature);
    if (!is_array(logits) || !PyLong_CheckExact(k.ptr()) || (has_mask && !is_array(mask)) ||
        (has_temperatures && !is_array(temperature))) {
      return false;
    }
    if (needs_framework({logits, has_mask ? mask : nb::handle(), out[0], out[1], out[2]},
                        has_temperatures ? temperature : nb::handle())) {
      return false;
    }
    key.add(values);
    key.add(normalize);
    key.add(backend);
    if (!add_number(key, k) || !read(logits, arrays.logits) || !is_last(dim, arrays.logits)) return false;
    key.add(arrays.logits);
    if (!add_temperature(key, temperature, arrays.temperature)) return false;
    key.add(has_mask);
    if (has_mask) {
      if (!read(mask, arrays.mask)) return false;
      key.add(arrays.mask);
    }
    return !out[0] || (read(out[0], arrays.values) && read(out[1], arrays.indices) && read(out[2], arrays.logsumexp));
  }

  bool read_full_rows(nb::handle values, nb::handle logits, nb::handle dim, nb::handle temperature, nb::handle dtype,
                      nb::handle backend, Array& rows, Array& temperatures, Key& key) const {
    const bool has_temperatures = !temperature_is_number(temperature);
    if (!is_array(logits) || (has_temperatures && !is_array(temperature))) return false;
    if (needs_framework({logits}, has_temperatures ? temperature : nb::handle())) return false;
    key.add(values);
    key.add(dtype);
    key.add(backend);
    if (!read(logits, rows) || !is_last(dim, rows)) return false;
    key.add(rows);
    return add_temperature(key, temperature, temperatures);
  }

  // Whether the framework must see a call with these arrays: need_dispatcher() of operators/dispatch.py.
  // Temperatures may not have a gradient even where none are recorded. Null handles are left out.
  bool needs_framework(std::initializer_list<nb::handle> arrays, nb::handle temperature) const {
    const nb::object level = attribute(framework_.forward_mode, current_level_);
    if (PyLong_AsLong(level.ptr()) >= 0 ||
        has_unknown_bits(call(framework_.keys_of_thread), framework_.known_of_thread)) {
      return true;
    }
    for (const nb::handle array : arrays) {
      if (array &&
          (has_unknown_keys(array) || (has_gradient(array) && call(framework_.records_gradients).ptr() != Py_False))) {
        return true;
      }
    }
    return temperature && (has_unknown_keys(temperature) || has_gradient(temperature));
  }

  bool has_unknown_keys(nb::handle array) const {
    return has_unknown_bits(call(framework_.keys_of_array, array), framework_.known_of_array);
  }

  bool has_unknown_bits(const nb::object& keys, u64 known) const {
    PyObject* const arguments[] = {keys.ptr()};
    const auto bits = checked(PyObject_VectorcallMethod(raw_repr_.ptr(), arguments, 1, nullptr));
    return (PyLong_AsUnsignedLongLongMask(bits.ptr()) & ~known) != 0;
  }

  bool has_gradient(nb::handle array) const { return attribute(array, requires_grad_).ptr() != Py_False; }

  // Takes the result of a function of Python, and throws if it is an error.
  static nb::object checked(PyObject* result) {
    if (!result) throw nb::python_error();
    return nb::steal(result);
  }

  static nb::object attribute(nb::handle object, const nb::str& name) {
    return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
  }

  static nb::object call(nb::handle function) {
    return checked(PyObject_Vectorcall(function.ptr(), nullptr, 0, nullptr));
  }

  static nb::object call(nb::handle function, nb::handle argument) {
    PyObject* const arguments[] = {argument.ptr()};
    return checked(PyObject_Vectorcall(function.ptr(), arguments, 1, nullptr));
  }

  bool read(nb::handle object, Array& array) const {
    if (api_->from_object(object.ptr(), &array) != 0) {
      PyErr_Clear();
      return false;
    }
    if (array.dims > kMostDims || array.device_type != dlpack::kCpu || (array.dims > 0 && !array.strides)) return false;
    array.data = static_cast<char*>(array.data) + array.byte_offset;
    return true;
  }

  static bool add_number(Key& key, nb::handle number) {
    const long long value = PyLong_AsLongLong(number.ptr());
    if (value == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    key.add(i64(value));
    return true;
  }

  bool add_temperature(Key& key, nb::handle temperature, Array& array) const {
    if (temperature.is_none()) {
      key.add(0);
    } else if (PyFloat_CheckExact(temperature.ptr())) {
      const double number = PyFloat_AsDouble(temperature.ptr());
      i64 bits;
      std::memcpy(&bits, &number, sizeof bits);
      key.add(1);
      key.add(bits);
    } else if (PyLong_CheckExact(temperature.ptr())) {
      key.add(2);
      return add_number(key, temperature);
    } else {
      if (!read(temperature, array) || !has_type(array, kFloat32)) return false;
      key.add(3);
      key.add(array);
    }
    return true;
  }

  // Whether `dim` is the last dimension.
  static bool is_last(nb::handle dim, const Array& logits) {
    if (!PyLong_CheckExact(dim.ptr())) return false;
    const long long number = PyLong_AsLongLong(dim.ptr());
    if (number == -1 && PyErr_Occurred()) PyErr_Clear();
    return number == -1 || number == logits.dims - 1;
  }

  // named: the objects that the key names.
  template <class REQUEST>
  std::shared_ptr<const Kept<REQUEST>> kept(const Key& key, nb::handle request, nb::handle logits, nb::handle results,
                                            std::initializer_list<nb::handle> named) const {
    const auto kept = std::make_shared<Kept<REQUEST>>();
    kept->key = key;
    kept->owner = nb::borrow(request);
    kept->request = nb::inst_ptr<REQUEST>(request);
    kept->device = logits.attr("device");
    for (const nb::handle result : results) {
      if (is_array(result)) {
        kept->results.push_back({nb::borrow(result), {}, {}});
      } else {
        kept->results.push_back({{}, result[0], result[1]});
      }
    }
    for (const nb::handle object : named) kept->named.push_back(nb::borrow(object));
    return kept;
  }

  template <class REQUEST>
  nb::object new_array(const Kept<REQUEST>& kept, u32 number) const {
    const Result& result = kept.results[number];
    if (result.like) return like(result.like);
    PyObject* const arguments[] = {result.size.ptr(), result.dtype.ptr(), kept.device.ptr()};
    return checked(PyObject_Vectorcall(framework_.empty.ptr(), arguments, 0, empty_names_.ptr()));
  }

  nb::object like(nb::handle array) const { return call(framework_.empty_like, array); }

  // The tuple as a result. This skips the __new__ of a named tuple, which is written in Python.
  nb::object result_of(const nb::object& fields) const {
    const auto make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    const nb::tuple arguments = nb::make_tuple(fields);
    return checked(make(reinterpret_cast<PyTypeObject*>(framework_.result_type.ptr()), arguments.ptr(), nullptr));
  }

  // is_plain_out() of functional/out.py.
  static bool is_plain_out(const TopkArrays& arrays, const Problem& request, bool has_temperatures, bool has_mask) {
    const auto has_shape = [&](const Array& array, bool has_k) {
      const size_t rows = request.sizes.size();
      if (size_t(array.dims) != rows + has_k || !is_contiguous(array)) return false;
      return std::equal(request.sizes.begin(), request.sizes.end(), array.shape) &&
             (!has_k || array.shape[rows] == request.k);
    };
    if (!has_shape(arrays.values, true) || !has_shape(arrays.indices, true) || !has_shape(arrays.logsumexp, false) ||
        !has_type(arrays.values, request.value_kind == ValueKind::kLogits ? request.dtype : kFloat32) ||
        !(has_type(arrays.indices, dlpack::kInt, 64) || has_type(arrays.indices, dlpack::kInt, 32)) ||
        !has_type(arrays.logsumexp, kFloat32)) {
      return false;
    }
    std::pair<std::uintptr_t, std::uintptr_t> taken[6];
    u32 count = 0;
    taken[count++] = bytes_of(arrays.logits);
    if (has_temperatures) taken[count++] = bytes_of(arrays.temperature);
    if (has_mask) taken[count++] = bytes_of(arrays.mask);
    for (const Array* written : {&arrays.values, &arrays.indices, &arrays.logsumexp}) {
      const auto bytes = bytes_of(*written);
      for (u32 i = 0; i < count; ++i) {
        if (bytes.first < taken[i].second && taken[i].first < bytes.second) return false;
      }
      taken[count++] = bytes;
    }
    return true;
  }

  static std::uintptr_t address(const Array& array) { return reinterpret_cast<std::uintptr_t>(array.data); }

  // Small inputs use one thread. Asking torch for its number of threads would take too long.
  u32 threads_for(const Array& logits) const {
    if (elements_of(logits) < 2 * kFewestElements) return 1;
    return nb::cast<u32>(call(framework_.num_threads));
  }

  static nb::str name(const char* name) { return nb::steal<nb::str>(PyUnicode_InternFromString(name)); }

  const Framework framework_;
  const nb::tuple empty_names_ = nb::make_tuple(name("size"), name("dtype"), name("device"));
  const nb::str requires_grad_ = name("requires_grad");
  const nb::str current_level_ = name("_current_level");
  const nb::str raw_repr_ = name("raw_repr");
  const dlpack::ExchangeApi* api_;
  mutable Table<Topk> topk_;
  mutable Table<FullRows> full_rows_;
};

// A method of ShortCalls as a function of Python, called without nanobind, which takes longer for arguments that are None.
template <class... ARGUMENTS, size_t... I>
nb::object call_with(const ShortCalls& calls, nb::object (ShortCalls::*method)(ARGUMENTS...) const,
                     PyObject* const* given, std::index_sequence<I...>) {
  return (calls.*method)(nb::handle(given[I])...);
}

template <auto METHOD, class... ARGUMENTS>
PyObject* call_fast(nb::object (ShortCalls::*)(ARGUMENTS...) const, PyObject* self, PyObject* const* given,
                    Py_ssize_t count) {
  if (count != Py_ssize_t(sizeof...(ARGUMENTS))) {
    PyErr_Format(PyExc_TypeError, "takes %zu positional arguments, got %zd", sizeof...(ARGUMENTS), count);
    return nullptr;
  }
  try {
    return call_with(*nb::inst_ptr<ShortCalls>(self), METHOD, given, std::index_sequence_for<ARGUMENTS...>())
        .release()
        .ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <auto METHOD>
PyObject* call_method(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return call_fast<METHOD>(METHOD, self, given, count);
}

template <auto METHOD>
nb::object bound_method(nb::handle self) {
  static PyMethodDef method = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_method<METHOD>)),
                               METH_FASTCALL, nullptr};
  return nb::steal(PyCFunction_NewEx(&method, self.ptr(), nullptr));
}

}  // namespace

void bind_short_calls(nb::module_& module) {
  nb::class_<ShortCalls>(module, "ShortCalls")
      .def("__init__",
           [](ShortCalls* self, nb::object array_type, nb::object result_type, nb::object empty, nb::object empty_like,
              nb::object num_threads, nb::object is_inference, nb::object have_changed, nb::object keys_of_array,
              nb::object keys_of_thread, u64 known_of_array, u64 known_of_thread, nb::object records_gradients,
              nb::object forward_mode) {
             new (self) ShortCalls({array_type, result_type, empty, empty_like, num_threads, is_inference, have_changed,
                                    keys_of_array, keys_of_thread, known_of_array, known_of_thread, records_gradients,
                                    forward_mode});
           })
      .def_prop_ro("topk", bound_method<&ShortCalls::topk>)
      .def_prop_ro("keep_topk", bound_method<&ShortCalls::keep_topk>)
      .def_prop_ro("full_rows", bound_method<&ShortCalls::full_rows>)
      .def_prop_ro("keep_full_rows", bound_method<&ShortCalls::keep_full_rows>);
}

}  // namespace fused_topk::cpu
