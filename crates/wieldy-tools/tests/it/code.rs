//! The code tools: definitions, references, the map and modules of small projects in several languages.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Executor, FileRules, ToolResult};
use wieldy_tools::code::Code;
use wieldy_tools::{Workspace, code_tools};

use crate::world::refusal;

/// A folder of files, and an executor with the code tools.
struct Project {
    folder: tempfile::TempDir,
    executor: Executor,
}

impl Project {
    fn new(files: &[(&str, &str)]) -> Self {
        Self::ruled(files, FileRules::default())
    }

    fn ruled(files: &[(&str, &str)], rules: FileRules) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let workspace = Arc::new(Workspace::open(folder.path()).expect("it is there"));
        let mut builder = Executor::builder().tools(code_tools(Arc::new(Code::new(workspace, None))));
        builder.workspace = folder.path().to_owned();
        builder.files = rules;
        let project = Self { folder, executor: builder.build().expect("the tools have different names") };
        files.iter().for_each(|(path, content)| project.put(path, content));
        project
    }

    fn put(&self, path: &str, content: &str) {
        let path = self.folder.path().join(path);
        std::fs::create_dir_all(path.parent().expect("it is in the folder")).expect("folders");
        std::fs::write(path, content).expect("a file");
    }

    async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments).by(Arc::new(Caller::local()))).await
    }

    async fn text(&self, tool: &str, arguments: Value) -> String {
        let result = self.call(tool, arguments).await;
        assert!(result.is_success(), "{:?}", result.error);
        result.text()
    }

    async fn structured(&self, tool: &str, arguments: Value) -> Value {
        let result = self.call(tool, arguments).await;
        assert!(result.is_success(), "{:?}", result.error);
        result.structured.expect("a structured answer")
    }

    async fn refusal(&self, tool: &str, arguments: Value) -> String {
        refusal(&self.call(tool, arguments).await)
    }

    /// Returns the references of a symbol as `path:line:column kind confidence`.
    async fn references(&self, arguments: Value) -> Vec<String> {
        let answer = self.structured("find_references", arguments).await;
        let text = |one: &Value, name: &str| one[name].as_str().unwrap_or_default().to_owned();
        let all = answer["references"].as_array().expect("a list");
        let shown = all.iter().map(|one| {
            let place = format!("{}:{}:{}", text(one, "path"), one["line"], one["column"]);
            format!("{place} {} {}", text(one, "kind"), text(one, "confidence"))
        });
        shown.collect()
    }
}

fn python() -> Project {
    Project::new(&[
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

#[tokio::test]
async fn the_best_definition_comes_with_its_source_and_the_others_are_listed() {
    let project = python();
    insta::assert_snapshot!(project.text("find_definition", json!({"symbol": "Order"})).await, @"
    other.py:1:6 class: class Order
         1  class Order:
         2      pass
    1 more:
    shop/models.py:6:7 class: class Order(Base)
    ");
    let answer = project.structured("find_definition", json!({"symbol": "Order", "from": {"path": "app.py"}})).await;
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
          "column": 6,
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
    let project = python();
    let find = async |arguments: Value| {
        let answer = project.structured("find_definition", arguments).await;
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
    let project = python();
    insta::assert_snapshot!(project.text("find_definition", json!({"symbol": "Ordr"})).await, @"
    `Ordr` is not defined here
    names like it: `Order`, `order`, `Ordered`
    ");
    insta::assert_snapshot!(project.text("find_definition", json!({"symbol": "Form.total"})).await, @"
    `Form.total` is not defined here
    `total` is defined as:
    shop/models.py:9:5 field of Order: total = 0
    ");
    insta::assert_snapshot!(project.text("find_definition", json!({"symbol": "comment"})).await, @"
    `comment` is not defined here
    the word occurs in:
    shop/forms.py:3: # Order in a comment
    ");
    insta::assert_snapshot!(project.refusal("find_definition", json!({"symbol": "two words"})).await, @"
    E3303: `two words` is not the name of a symbol
    (give a name such as `name`, `Type::name`, `Class.method` or `module::name`; search for text with `search_code`)
    ");
    insta::assert_snapshot!(project.refusal("find_definition", json!({"symbol": "Order", "scope": "shopp"})).await, @"
    E3302: there is no `shopp`
    (did you mean `shop`?)
    ");
}

#[tokio::test]
async fn references_are_graded_by_the_imports_of_their_files() {
    let project = python();
    insta::assert_snapshot!(project.text("find_references", json!({"symbol": "models.Order"})).await, @"
    9 references of `models.Order` in 4 files: 8 exact, 0 likely, 1 by name only
    app.py
      1:17 import: from shop import Order, OrderForm
      4:9 call: order = Order()
      6:8 read: models.Order.save(order)
    shop/__init__.py
      1:20 import: from .models import Order
    shop/models.py
      16:16 read: return Order
    tests/test_shop.py
      1:24 import: from shop.models import Order as Ordered
      5:5 write (name): Order = Ordered()
      5:13 call: Order = Ordered()
      6:5 call: Ordered().save()
    [1 files hold the word but have no syntax tree; `Search` finds it there]
    ");
    assert_eq!(project.references(json!({"symbol": "Order.save"})).await, [""; 0]);
    assert_eq!(project.references(json!({"symbol": "other.Order"})).await, [""; 0]);
    assert_eq!(
        project.references(json!({"symbol": "models.Order", "kinds": ["call"], "confidence": "exact"})).await,
        [""; 0]
    );
    let answer = project
        .structured(
            "find_references",
            json!({"symbol": "save", "limit": 1, "definition": {"path": "shop/models.py", "line": 12}}),
        )
        .await;
    insta::assert_snapshot!(serde_json::to_string_pretty(&answer).expect("plain data"), @"");
}
