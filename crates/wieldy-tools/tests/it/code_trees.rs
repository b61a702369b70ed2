//! Definitions, references and modules of small projects in several languages.

use serde_json::{Value, json};
use wieldy_core::FileRules;

use crate::world::World;

fn project(files: &[(&str, &str)]) -> World {
    let world = World::new();
    for (path, content) in files {
        world.put(path, content);
    }
    world
}

pub(crate) async fn structured(world: &World, tool: &str, arguments: Value) -> Value {
    let result = world.call(tool, arguments).await;
    assert!(result.is_success(), "{:?}", result.error);
    result.structured.expect("a structured answer")
}

/// Returns the references of a symbol as `path:line:column kind confidence`.
async fn references(world: &World, arguments: Value) -> String {
    let answer = structured(world, "find_references", arguments).await;
    let text = |one: &Value, name: &str| one[name].as_str().unwrap_or_default().to_owned();
    let all = answer["references"].as_array().expect("a list");
    let shown = all.iter().map(|one| {
        let place = format!("{}:{}:{}", text(one, "path"), one["line"], one["column"]);
        format!("{place} {} {}", text(one, "kind"), text(one, "confidence"))
    });
    shown.collect::<Vec<_>>().join("\n")
}

fn python() -> World {
    project(&[
        ("shop/__init__.py", "from .models import Order\nfrom .forms import Form as OrderForm\n"),
        (
            "shop/models.py",
            "class Base:\n    def save(self):\n        pass\n\n\nclass Order(Base):\n    \"\"\"An order.\"\"\"\n\n    total = 0\n\n    \
             def save(self, force=False):\n        self.total = 1\n        return self.save_all(force)\n\n    \
             def save_all(self, save):\n        return Order\n",
        ),
        ("shop/forms.py", "class Form:\n    def save(self):\n        # Order in a comment\n        return \"Order\"\n"),
        (
            "app.py",
            "from shop import Order, OrderForm\nimport shop.models as models\n\norder = Order()\norder.save(force=True)\nmodels.Order.save(order)\nOrderForm().save()\n",
        ),
        (
            "tests/test_shop.py",
            "from shop.models import Order as Ordered\n\n\ndef test_order():\n    Order = Ordered()\n    Ordered().save()\n",
        ),
        ("other.py", "class Order:\n    pass\n\n\nOrder()\n"),
        ("notes.md", "An Order is here.\n"),
    ])
}

// Shows: C6.3
#[tokio::test]
async fn the_best_definition_comes_with_its_source_and_the_others_are_listed() {
    let world = python();
    insta::assert_snapshot!(world.text("find_definition", json!({"symbol": "Order"})).await, @"
    other.py:1:7 class: class Order
         1  class Order:
         2      pass
    1 more:
    shop/models.py:6:7 class: class Order(Base)
    ");
    let answer = structured(&world, "find_definition", json!({"symbol": "Order", "from": {"path": "app.py"}})).await;
    insta::assert_snapshot!(serde_json::to_string_pretty(&answer).expect("plain data"), @r#"
    {
      "path": "shop/models.py",
      "line": 6,
      "column": 7,
      "end_line": 16,
      "name": "Order",
      "kind": "class",
      "signature": "class Order(Base)",
      "container": null,
      "visibility": "public",
      "declaration": false,
      "doc": "    \"\"\"An order.\"\"\"",
      "source": "class Order(Base):\n    \"\"\"An order.\"\"\"\n\n    total = 0\n\n    def save(self, force=False):\n        self.total = 1\n        return self.save_all(force)\n\n    def save_all(self, save):\n        return Order",
      "via": [
        {
          "path": "shop/__init__.py",
          "line": 1
        }
      ],
      "definitions": [
        {
          "path": "other.py",
          "line": 1,
          "column": 7,
          "end_line": 2,
          "name": "Order",
          "kind": "class",
          "signature": "class Order",
          "container": null,
          "visibility": "public",
          "declaration": false
        }
      ],
      "total": 2,
      "more": false,
      "index": {
        "files": 7,
        "indexed": 7,
        "skipped": {},
        "complete": true
      }
    }
    "#);
}

#[tokio::test]
async fn a_definition_is_found_by_its_owner_kind_and_scope() {
    let world = python();
    let find = async |arguments: Value| {
        let answer = structured(&world, "find_definition", arguments).await;
        format!("{}:{} of {}", answer["path"].as_str().unwrap_or("none"), answer["line"], answer["total"])
    };
    assert_eq!(find(json!({"symbol": "Order.save"})).await, "shop/models.py:11 of 1");
    assert_eq!(find(json!({"symbol": "models.Base.save"})).await, "shop/models.py:2 of 1");
    assert_eq!(find(json!({"symbol": "other.Order"})).await, "other.py:1 of 1");
    assert_eq!(find(json!({"symbol": "total", "kind": "field"})).await, "shop/models.py:9 of 1");
    assert_eq!(find(json!({"symbol": "Order", "kind": "function"})).await, "none:null of 0");
    assert_eq!(find(json!({"symbol": "save", "scope": "shop/forms.py"})).await, "shop/forms.py:2 of 1");
    assert_eq!(find(json!({"symbol": "OrderForm"})).await, "shop/forms.py:1 of 1");
    assert_eq!(find(json!({"symbol": "Order", "from": {"path": "other.py", "line": 5}})).await, "other.py:1 of 2");
}

#[tokio::test]
async fn a_symbol_without_a_definition_is_answered_with_names_like_it() {
    let world = python();
    insta::assert_snapshot!(world.text("find_definition", json!({"symbol": "Ordr"})).await, @"
    `Ordr` is not defined here
    names like it: `Order`, `order`, `Ordered`
    ");
    insta::assert_snapshot!(world.text("find_definition", json!({"symbol": "Form.total"})).await, @"
    `Form.total` is not defined here
    `total` is defined as:
    shop/models.py:9:5 field of Order: total = 0
    ");
    insta::assert_snapshot!(world.text("find_definition", json!({"symbol": "comment"})).await, @"
    `comment` is not defined here
    the word occurs in:
    shop/forms.py:3: # Order in a comment
    ");
    insta::assert_snapshot!(world.refusal("find_definition", json!({"symbol": "two words"})).await, @"
    E3303: `two words` is not the name of a symbol
    (give a name such as `name`, `Type::name`, `Class.method` or `module::name`; search for text with `search_code`)
    ");
    insta::assert_snapshot!(world.refusal("find_definition", json!({"symbol": "Order", "scope": "shopp"})).await, @"
    E3302: there is no `shopp`
    (did you mean `shop`?)
    ");
}

// Shows: C6.3
#[tokio::test]
async fn references_are_graded_by_the_imports_of_their_files() {
    let world = python();
    insta::assert_snapshot!(world.text("find_references", json!({"symbol": "models.Order"})).await, @"
    9 references of `models.Order` in 4 files: 8 exact, 0 likely, 1 by name only
    app.py
      1:18 import: from shop import Order, OrderForm
      4:9 call: order = Order()
      6:8 read: models.Order.save(order)
    shop/__init__.py
      1:21 import: from .models import Order
    shop/models.py
      16:16 read: return Order
    tests/test_shop.py
      1:25 import: from shop.models import Order as Ordered
      5:5 write (name): Order = Ordered()
      5:13 call: Order = Ordered()
      6:5 call: Ordered().save()
    [1 files hold the word but have no syntax tree; `Search` finds it there]
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "Order.save"})).await, @"
    app.py:5:7 call name
    app.py:6:14 call exact
    app.py:7:13 call name
    tests/test_shop.py:6:15 call name
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "other.Order"})).await, @"
    other.py:5:1 call exact
    tests/test_shop.py:5:5 write name
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "models.Order", "kinds": ["call"], "confidence": "exact"})).await, @"
    app.py:4:9 call exact
    tests/test_shop.py:5:13 call exact
    tests/test_shop.py:6:5 call exact
    ");
    let answer = structured(
        &world,
        "find_references",
        json!({"symbol": "save", "limit": 1, "definition": {"path": "shop/models.py", "line": 12}}),
    )
    .await;
    insta::assert_snapshot!(serde_json::to_string_pretty(&answer).expect("plain data"), @r#"
    {
      "references": [
        {
          "path": "app.py",
          "line": 6,
          "column": 14,
          "text": "models.Order.save(order)",
          "kind": "call",
          "in": null,
          "confidence": "exact"
        }
      ],
      "counts": {
        "exact": 1,
        "likely": 0,
        "name": 3
      },
      "files": 2,
      "total": 4,
      "more": true,
      "definitions": [
        {
          "path": "shop/models.py",
          "line": 11,
          "column": 9,
          "end_line": 13,
          "name": "save",
          "kind": "method",
          "signature": "def save(self, force=False)",
          "container": "Order",
          "visibility": "public",
          "declaration": false
        }
      ],
      "without_tree": 0,
      "index": {
        "files": 7,
        "indexed": 7,
        "skipped": {},
        "complete": true
      }
    }
    "#);
}

pub(crate) fn rust() -> World {
    project(&[
        ("Cargo.toml", "[workspace]\n"),
        (
            "crates/walk-er/src/lib.rs",
            "//! Walks.\n\nmod frame;\npub mod rules;\npub use frame::Frame;\npub use rules::{Rule as Law, Verdict};\n\n/// Starts.\npub fn start(law: &Law) -> Frame {\n    let frame = Frame::new(law);\n    frame.step();\n    frame\n}\n",
        ),
        (
            "crates/walk-er/src/frame.rs",
            "use crate::rules::{Rule, Verdict::*};\n\npub struct Frame {\n    pub depth: u32,\n}\n\nimpl Frame {\n    pub fn new(rule: &Rule) -> Self {\n        Self { depth: rule.depth }\n    }\n\n    pub fn step(&self) -> bool {\n        self.helper(Kept)\n    }\n\n    fn helper(&self, verdict: super::rules::Verdict) -> bool {\n        matches!(verdict, Kept)\n    }\n}\n",
        ),
        (
            "crates/walk-er/src/rules.rs",
            "pub struct Rule {\n    pub depth: u32,\n}\n\npub enum Verdict {\n    Kept,\n    Left,\n}\n\nimpl Rule {\n    pub fn step(&self) {}\n}\n",
        ),
        (
            "crates/app/src/main.rs",
            "use walk_er::{Frame, rules};\n\nfn main() {\n    let rule = rules::Rule { depth: 1 };\n    let frame = Frame::new(&rule);\n    frame.step();\n    walk_er::start(&rule).step();\n}\n",
        ),
    ])
}

#[tokio::test]
async fn rust_is_followed_through_crates_modules_and_re_exports() {
    let world = rust();
    insta::assert_snapshot!(references(&world, json!({"symbol": "Frame"})).await, @"
    crates/app/src/main.rs:1:15 import exact
    crates/app/src/main.rs:5:17 read exact
    crates/walk-er/src/frame.rs:7:6 type exact
    crates/walk-er/src/lib.rs:5:16 import exact
    crates/walk-er/src/lib.rs:9:28 type exact
    crates/walk-er/src/lib.rs:10:17 read exact
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "Rule"})).await, @"
    crates/app/src/main.rs:4:23 type exact
    crates/walk-er/src/frame.rs:1:20 import exact
    crates/walk-er/src/frame.rs:8:23 type exact
    crates/walk-er/src/lib.rs:6:17 import exact
    crates/walk-er/src/lib.rs:9:20 type exact
    crates/walk-er/src/rules.rs:10:6 type exact
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "Frame::step"})).await, @"
    crates/app/src/main.rs:6:11 call name
    crates/app/src/main.rs:7:27 call name
    crates/walk-er/src/lib.rs:11:11 call name
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "Verdict::Kept"})).await, @"
    crates/walk-er/src/frame.rs:13:21 read exact
    crates/walk-er/src/frame.rs:17:27 read exact
    ");
    insta::assert_snapshot!(world.text("find_definition", json!({"symbol": "walk_er::Frame"})).await, @"
    crates/walk-er/src/frame.rs:3:12 struct: pub struct Frame
      via crates/walk-er/src/lib.rs:5
         3  pub struct Frame {
         4      pub depth: u32,
         5  }
    ");
    insta::assert_snapshot!(world.text("find_definition", json!({"symbol": "Law"})).await, @"
    crates/walk-er/src/rules.rs:1:12 struct: pub struct Rule
      via crates/walk-er/src/lib.rs:6
         1  pub struct Rule {
         2      pub depth: u32,
         3  }
    ");
}

#[tokio::test]
async fn typescript_and_go_are_followed_through_their_imports() {
    let world = project(&[
        ("web/index.ts", "export { Form as Sheet } from './form';\nexport * from './tools';\n"),
        ("web/form.ts", "export class Form {\n  save(): void {}\n}\n"),
        ("web/tools.ts", "export const make = (): number => 1;\n"),
        (
            "web/app.tsx",
            "import { Sheet, make } from '.';\nimport * as tools from './tools.js';\n\nexport const view = () => <Sheet name={make()} other={tools.make()} />;\n",
        ),
        ("web/other.js", "const { make } = require('make');\nmake();\n"),
        ("go.mod", "module example.org/app\n"),
        (
            "pkg/store/store.go",
            "package store\n\ntype Store struct{ Name string }\n\nfunc New() *Store { return &Store{} }\n\nfunc (s *Store) Save() error { return nil }\n",
        ),
        ("pkg/store/more.go", "package store\n\nfunc twice() { New(); New() }\n"),
        (
            "main.go",
            "package main\n\nimport st \"example.org/app/pkg/store\"\n\nfunc main() {\n\ts := st.New()\n\ts.Save()\n\tNew()\n}\n\nfunc New() {}\n",
        ),
    ]);
    insta::assert_snapshot!(references(&world, json!({"symbol": "Form"})).await, @"
    web/app.tsx:1:10 import exact
    web/app.tsx:4:28 call exact
    web/index.ts:1:10 import exact
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "make"})).await, @"
    web/app.tsx:1:17 import exact
    web/app.tsx:4:40 call exact
    web/app.tsx:4:61 call exact
    web/other.js:1:9 write likely
    web/other.js:2:1 call likely
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "store.New"})).await, @"
    main.go:6:10 call exact
    pkg/store/more.go:3:16 call exact
    pkg/store/more.go:3:23 call exact
    ");
    insta::assert_snapshot!(references(&world, json!({"symbol": "Store.Save"})).await, @"main.go:7:4 call likely");
    insta::assert_snapshot!(world.text("find_definition", json!({"symbol": "Sheet"})).await, @"
    web/form.ts:1:14 class: class Form
      via web/index.ts:1
         1  export class Form {
         2    save(): void {}
         3  }
    ");
}

#[tokio::test]
async fn a_module_is_shown_with_its_symbols_and_importers() {
    let world = rust();
    insta::assert_snapshot!(world.text("InspectModule", json!({"module": "walk_er::rules"})).await, @"
    crates/walk-er/src/rules.rs: rust, 12 lines
        1  pub struct Rule
        2    pub depth: u32
       11    pub fn step(&self)
        5  pub enum Verdict
        6    Kept
        7    Left
    imported by: crates/app/src/main.rs, crates/walk-er/src/frame.rs, crates/walk-er/src/lib.rs
    ");
    insta::assert_snapshot!(world.text("InspectModule", json!({"path": "crates/walk-er", "depth": 1})).await, @"
    crates/walk-er/src/lib.rs: rust, 13 lines
      //! Walks.
        3  mod frame
        4  pub mod rules
        9  pub fn start(law: &Law) -> Frame
    imports: Frame from frame, Rule from rules as Law, Verdict from rules
    imported by: crates/app/src/main.rs
    ");
    let answer = structured(&world, "InspectModule", json!({"path": "crates/walk-er/src/frame.rs"})).await;
    insta::assert_snapshot!(serde_json::to_string_pretty(&answer).expect("plain data"), @r#"
    {
      "path": "crates/walk-er/src/frame.rs",
      "language": "rust",
      "lines": 19,
      "hash": "5b45fbec5a98c1b83f3cb6287579b986226087222b0ade02970cc0575cce18f4",
      "doc": null,
      "broken": false,
      "symbols": [
        {
          "name": "Frame",
          "kind": "struct",
          "signature": "pub struct Frame",
          "line": 3,
          "end_line": 5,
          "visibility": "public",
          "declaration": false,
          "symbols": [
            {
              "name": "depth",
              "kind": "field",
              "signature": "pub depth: u32",
              "line": 4,
              "end_line": 4,
              "visibility": "public",
              "declaration": false,
              "symbols": []
            },
            {
              "name": "new",
              "kind": "method",
              "signature": "pub fn new(rule: &Rule) -> Self",
              "line": 8,
              "end_line": 10,
              "visibility": "public",
              "declaration": false,
              "symbols": []
            },
            {
              "name": "step",
              "kind": "method",
              "signature": "pub fn step(&self) -> bool",
              "line": 12,
              "end_line": 14,
              "visibility": "public",
              "declaration": false,
              "symbols": []
            },
            {
              "name": "helper",
              "kind": "method",
              "signature": "fn helper(&self, verdict: super::rules::Verdict) -> bool",
              "line": 16,
              "end_line": 18,
              "visibility": "private",
              "declaration": false,
              "symbols": []
            }
          ]
        }
      ],
      "cut": false,
      "imports": [
        {
          "local": "Rule",
          "module": "crate::rules",
          "original": "Rule",
          "reexport": false,
          "line": 1
        },
        {
          "local": "*",
          "module": "crate::rules::Verdict",
          "original": "*",
          "reexport": false,
          "line": 1
        }
      ],
      "imported_by": [
        "crates/walk-er/src/lib.rs"
      ],
      "others": [],
      "index": {
        "files": 5,
        "indexed": 5,
        "skipped": {},
        "complete": true
      }
    }
    "#);
    insta::assert_snapshot!(world.refusal("InspectModule", json!({"module": "ruls"})).await, @"
    E3303: there is no module `ruls`
    (did you mean `rules`?)
    ");
    insta::assert_snapshot!(world.refusal("InspectModule", json!({})).await, @"
    E3303: one of `path` and `module` is needed, and not both
    (give `path`, such as `src/main.rs`, or `module`, such as `package.module`)
    ");
    insta::assert_snapshot!(world.refusal("InspectModule", json!({"path": "crates"})).await, @"
    E3303: `crates` is no module in the index of code
    (name a file of source code that is not hidden and that `.gitignore` does not exclude)
    ");
    insta::assert_snapshot!(world.refusal("InspectModule", json!({"path": "Cargo.toml"})).await, @"
    E3303: `Cargo.toml` has no outline: language
    (read it with `Read`, or search it with `Search`)
    ");
}

#[tokio::test]
async fn a_hidden_file_is_in_no_answer() {
    let rules = FileRules { hidden: vec!["secret".into()], ..FileRules::default() };
    let world = python().ruled(rules);
    world
        .put("secret/keys.py", "class HiddenKey:\n    pass\n\n\nOrder = HiddenKey()\n")
        .put("shown.py", "import secret.keys\n");
    let calls = [
        ("find_definition", json!({"symbol": "HiddenKey"})),
        ("find_definition", json!({"symbol": "HiddenKeyy"})),
        ("find_definition", json!({"symbol": "Order"})),
        ("find_references", json!({"symbol": "Order"})),
        ("find_references", json!({"symbol": "HiddenKey"})),
        ("get_repo_map", json!({"focus": ["secret/keys.py"]})),
        ("InspectModule", json!({"path": "shown.py"})),
        ("InspectModule", json!({"module": "keys"})),
    ];
    for (tool, arguments) in calls {
        let result = world.call(tool, arguments.clone()).await;
        let shown = format!("{} {:?} {:?}", result.text(), result.structured, result.error);
        assert!(
            !shown.contains("class HiddenKey") && !shown.contains("secret/keys.py:"),
            "{tool} {arguments}: {shown}"
        );
    }
    for (tool, arguments) in [
        ("InspectModule", json!({"path": "secret/keys.py"})),
        ("find_definition", json!({"symbol": "Order", "scope": "secret"})),
        ("find_definition", json!({"symbol": "Order", "from": {"path": "secret/keys.py"}})),
    ] {
        let refusal = world.refusal(tool, arguments).await;
        assert!(refusal.starts_with("E3"), "{refusal}");
    }
}

#[tokio::test]
async fn an_answer_follows_each_change_of_a_file() {
    let world = python();
    let find = async || structured(&world, "find_definition", json!({"symbol": "fresh"})).await["path"].clone();
    assert_eq!(find().await, Value::Null);
    world.put("app.py", "def fresh(): pass\n");
    assert_eq!(find().await, "app.py");
    std::fs::rename(world.path("app.py"), world.path("moved.py")).expect("it is there");
    assert_eq!(find().await, "moved.py");
    world.put("moved.py", "def crash(): pass\n");
    assert_eq!(find().await, Value::Null);
}
