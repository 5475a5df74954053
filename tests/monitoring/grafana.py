"""Holds dashboards against the types that Grafana publishes for them (grafana-foundation-sdk, made of its schemas).

usage: PYTHONPATH=target/tools/grafana grafana.py DASHBOARD.json...

The package reads leniently: it drops what it does not know. So this walks its types itself: an unknown key, a missing
required key, and a value of another type are errors, each with its place. A panel's options and custom
fields, and its queries, are held against the types of their plugin.
"""

import enum
import importlib
import inspect
import json
import re
import sys
import types
import typing

from grafana_foundation_sdk.models import dashboard

errors = []


def fields(kind):
    """The JSON keys of a class: the type of each, and whether it has to be there."""
    hints = typing.get_type_hints(kind) | typing.get_type_hints(kind.__init__)
    source = inspect.getsource(kind.to_json)
    required = dict(re.findall(r'^ +"(\w+)": self\.(\w+),$', source, re.M))
    optional = dict(re.findall(r'payload\["(\w+)"\] = self\.(\w+)$', source, re.M))
    return {key: (hints[name], key in required) for key, name in (required | optional).items()}


def plugin(kind, name, place):
    """The type `name` of a panel's plugin."""
    try:
        return getattr(importlib.import_module(f"grafana_foundation_sdk.models.{kind}"), name)
    except ModuleNotFoundError:
        errors.append(f"{place}: Grafana has no panel {kind!r}")
        return object


def problems(value, kind):
    """Checks without reporting."""
    mark = len(errors)
    check(value, kind, "")
    found = errors[mark:]
    del errors[mark:]
    return found


def check(value, kind, place):
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, typing.Any):
        return
    if dashboard.Panel in inner and isinstance(value, dict) and value.get("type") != "row":
        return check_panel(value, place)
    if origin in (typing.Union, types.UnionType):
        if not any(not problems(value, one) for one in inner):
            # The errors of the alternative that comes nearest.
            nearest = min((one for one in inner if one is not type(None)), key=lambda one: len(problems(value, one)))
            check(value, nearest, place)
    elif origin is typing.Literal:
        if value not in inner:
            errors.append(f"{place}: {value!r} is none of {inner}")
    elif origin is list:
        if not isinstance(value, list):
            errors.append(f"{place}: {value!r} is no list")
        else:
            for at, item in enumerate(value):
                check(item, inner[0], f"{place}[{at}]")
    elif origin is dict:
        if not isinstance(value, dict):
            errors.append(f"{place}: {value!r} is no object")
        else:
            for key, item in value.items():
                check(item, inner[1], f"{place}.{key}")
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if value not in [one.value for one in kind]:
            errors.append(f"{place}: {value!r} is none of {[one.value for one in kind]}")
    elif kind is type(None):
        if value is not None:
            errors.append(f"{place}: {value!r} is not null")
    elif kind in (str, bool, int, float):
        right = {float: (int, float)}.get(kind, kind)
        if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
            errors.append(f"{place}: {value!r} is no {kind.__name__}")
    elif inspect.isclass(kind) and hasattr(kind, "to_json"):
        check_object(value, fields(kind), place, kind.__name__)
    else:
        sys.exit(f"grafana.py: no rule for the type {kind} at {place}")


def check_object(value, known, place, name):
    if not isinstance(value, dict):
        errors.append(f"{place}: {value!r} is no {name}")
        return
    for key in value.keys() - known.keys():
        errors.append(f"{place}: {name} has no key {key!r}")
    for key, (kind, required) in known.items():
        if key in value:
            check(value[key], kind, f"{place}.{key}")
        elif required and typing.get_origin(kind) is not typing.Union:
            errors.append(f"{place}: {name} lacks {key!r}")


def check_panel(value, place):
    known = fields(dashboard.Panel)
    kind = value.get("type")
    query = importlib.import_module("grafana_foundation_sdk.models.prometheus").Dataquery
    known["options"] = (plugin(kind, "Options", place), True)
    known["targets"] = (list[query], True)
    check_object(value, known, place, f"panel {kind}")
    custom = value.get("fieldConfig", {}).get("defaults", {}).get("custom")
    if custom is not None:
        check(custom, plugin(kind, "FieldConfig", place), f"{place}.fieldConfig.defaults.custom")


for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        check(json.load(file), dashboard.Dashboard, path.rsplit("/", 1)[-1])
for error in errors:
    print(error)
sys.exit(1 if errors else 0)
