//! Tests the allow-list, and the parsing of hosts.

use proptest::prelude::*;

use super::*;

fn allowed(entries: &[&str]) -> Allowed {
    Allowed::new(&entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>()).unwrap()
}

fn reasons(entries: &[&str], asked: &[(&str, u16)]) -> Vec<Result<(), Reason>> {
    let allowed = allowed(entries);
    asked.iter().map(|(host, port)| allowed.decide(host, *port).map_err(|refusal| refusal.reason)).collect()
}

#[test]
fn a_star_stands_for_whole_labels() {
    let asked = [
        ("a.example.com", 443),
        ("b.a.EXAMPLE.com", 80),
        ("example.com", 443),
        ("evilexample.com", 443),
        ("a.example.com.evil", 443),
        ("example.com.evil", 443),
        ("a.example.co", 443),
        ("com", 443),
    ];
    let no = Err(Reason::NotListed);
    let expected = [Ok(()), Ok(()), no.clone(), no.clone(), no.clone(), no.clone(), no.clone(), no];
    assert_eq!(reasons(&["*.example.com"], &asked), expected);
}

#[test]
fn a_name_is_itself_only() {
    let asked = [("example.com", 443), ("Example.COM", 80), ("www.example.com", 443), ("evilexample.com", 443)];
    let expected = [Ok(()), Ok(()), Err(Reason::NotListed), Err(Reason::NotListed)];
    assert_eq!(reasons(&["example.com"], &asked), expected);
    assert_eq!(reasons(&[], &asked), vec![Err(Reason::NotListed); 4]);
}

#[test]
fn ports_are_those_of_the_web_unless_written() {
    let list = ["web.example", "one.example:8443", "all.example:*", "both.example", "both.example:22"];
    let asked = [
        ("web.example", 80),
        ("web.example", 443),
        ("web.example", 8443),
        ("web.example", 0),
        ("one.example", 8443),
        ("one.example", 443),
        ("all.example", 1),
        ("all.example", 65535),
        ("both.example", 22),
        ("both.example", 443),
        ("both.example", 23),
    ];
    let (yes, no) = (Ok(()), Err(Reason::Port));
    let expected = [&yes, &yes, &no, &no, &yes, &no, &yes, &yes, &yes, &yes, &no].map(Clone::clone);
    assert_eq!(reasons(&list, &asked), expected);
}

#[test]
fn addresses_are_open_only_where_they_are_written() {
    let list = ["127.0.0.1:8080", "[::1]:8080", "2606:4700::1111", "8.8.8.8", "dns.example"];
    let asked = [
        ("127.0.0.1", 8080),
        ("127.0.0.1", 80),
        ("[::1]", 8080),
        ("[2606:4700:0:0::1111]", 443),
        ("8.8.8.8", 443),
        ("8.8.4.4", 443),
        ("10.0.0.1", 80),
        ("[fe80::1]", 80),
    ];
    let expected = [
        Ok(()),
        Err(Reason::Port),
        Ok(()),
        Ok(()),
        Ok(()),
        Err(Reason::NotListed),
        Err(Reason::Private("10.0.0.1".parse().unwrap())),
        Err(Reason::Private("fe80::1".parse().unwrap())),
    ];
    assert_eq!(reasons(&list, &asked), expected);
}

#[test]
fn all_addresses_of_a_name_must_be_fit() {
    let list = allowed(&["name.example", "corp.example=private", "*.example", "*.corp.example:81=private", "10.0.0.1"]);
    let check = |name: &str, port, addresses: &[&str]| {
        let reach = list.admit(&Host::parse(name).unwrap(), port).unwrap();
        let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
        list.check(&addresses, port, reach)
    };
    let private = |address: &str| Err(Reason::Private(address.parse().unwrap()));
    assert_eq!(check("name.example", 80, &["8.8.8.8", "2606:4700::1111"]), Ok(()));
    assert_eq!(check("name.example", 80, &["8.8.8.8", "127.0.0.1"]), private("127.0.0.1"));
    assert_eq!(check("name.example", 80, &["::ffff:8.8.8.8", "8.8.8.8"]), private("::ffff:8.8.8.8"));
    assert_eq!(check("name.example", 80, &["10.0.0.1", "10.0.0.2"]), private("10.0.0.2"));
    assert_eq!(check("name.example", 80, &["10.0.0.1"]), Ok(()));
    assert_eq!(check("corp.example", 80, &["192.168.1.1", "8.8.8.8"]), Ok(()));
    assert_eq!(check("a.corp.example", 81, &["192.168.1.1"]), Ok(()));
}

#[test]
fn odd_spellings_are_refused() {
    let odd = [
        "127.1",
        "127.0.1",
        "0x7f000001",
        "0X7F000001",
        "0x7f.0.0.1",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "127.0.0.01",
        "127.0.0.1.",
        "256.0.0.1",
        "1.2.3.4.5",
        "example.0x",
        "example.42",
        "0x",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::1%25eth0]",
        "[fe80::1%eth0]",
        "[::1",
        "::1",
        "[]",
        "[127.0.0.1]",
        "[v1.x]",
        "example.com.",
        ".example.com",
        "example..com",
        ".",
        "",
        "%65xample.com",
        "127.0.0.1%00",
        "user@example.com",
        "example.com@evil",
        "exa mple.com",
        "exa\tmple.com",
        "example.com\n",
        "example.com\0",
        "example.com#evil",
        "example.com\\evil",
        "example.com/",
        "example.com?",
        "exämple.com",
        "example。com",
        "example．com",
        "①②⑦.0.0.1",
        "ｅxample.com",
        "exam_ple.com",
        "-example.com",
        "example-.com",
        "*.example.com",
        "*",
        "example.com:80",
    ];
    let list = allowed(&["*.com:*", "example.com:*", "127.0.0.1:*", "[::1]:*"]);
    let accepted: Vec<_> = odd
        .iter()
        .filter(|host| !matches!(list.decide(host, 80), Err(Refusal { reason: Reason::Spelling(_), .. })))
        .collect();
    assert_eq!(accepted, Vec::<&&str>::new());
    assert!(list.decide("127.0.0.1", 80).is_ok() && list.decide("[0::1]", 80).is_ok());
    assert!(list.decide("xn--exmple-cua.com", 80).is_ok());
}

#[test]
fn ports_have_one_spelling() {
    let odd = [
        "h:",
        "h:0",
        "h:080",
        "h:+80",
        "h:-1",
        "h:65536",
        "h:80:80",
        "h:8o",
        "h: 80",
        "[::1]80",
        "[::1]x:80",
        "::1:80",
    ];
    let accepted: Vec<_> = odd.iter().filter(|text| Authority::parse(text, Some(80)).is_ok()).collect();
    assert_eq!(accepted, Vec::<&&str>::new());
    assert_eq!(
        Authority::parse("h", None).map_err(|refusal| refusal.reason),
        Err(Reason::Spelling("the port is missing"))
    );
    let read = Authority::parse("[::1]:65535", None).unwrap();
    assert_eq!(read, Authority { host: Host::Address("::1".parse().unwrap()), port: 65535 });
}

#[test]
fn a_bad_entry_is_named() {
    let bad = [
        "",
        "*",
        "*.",
        "*.*.com",
        "a.*.com",
        "*example.com",
        "*.1.2.3.4",
        "https://example.com",
        "example.com/path",
        "example.com:http",
        "example.com:0",
        "example.com=public",
        "example.com=",
        "=private",
        "127.1",
        "::ffff:1.2.3.4",
        "a b",
    ];
    for entry in bad {
        let error = Allowed::new(&["good.example".to_owned(), entry.to_owned()]).unwrap_err();
        assert_eq!(error.entry, entry);
    }
    let error = Allowed::new(&["https://example.com".to_owned()]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`https://example.com` cannot stand in a list of hosts: this is a URL, not a host; \
         write HOST, *.HOST, HOST:PORT or HOST=private"
    );
}

#[test]
fn a_refusal_says_how_to_allow_it() {
    let text = |host: &str, port, reason| Refusal { host: host.to_owned(), port, reason }.to_string();
    let private = || Reason::Private("10.0.0.1".parse().unwrap());
    assert_eq!(
        text("evil.example", 443, Reason::NotListed),
        "evil.example:443 was refused: the `network` list does not name it; to allow it, add `evil.example` to the list"
    );
    assert_eq!(
        text("a.example", 22, Reason::Port),
        "a.example:22 was refused: the `network` list does not name this port; to allow it, add `a.example:22` to the list"
    );
    assert_eq!(
        text("a.example", 81, private()),
        "a.example:81 was refused: it leads to 10.0.0.1, which is not a public address; to allow that, \
         add `a.example:81=private` to the `network` list"
    );
    assert_eq!(
        text("10.0.0.1", 80, private()),
        "10.0.0.1:80 was refused: this is not a public address; to allow it all the same, add `10.0.0.1` to the `network` list"
    );
}

proptest! {
    #[test]
    fn no_text_makes_the_readers_panic(text in "(?s:.)*|[\\[\\]:.%@0-9a-fx*=-]{0,40}", port in any::<u16>()) {
        let _ = Authority::parse(&text, Some(port));
        let _ = Authority::parse(&text, None);
        let list = Allowed::new(std::slice::from_ref(&text)).unwrap_or_default();
        if let Err(refusal) = list.decide(&text, port) {
            prop_assert!(refusal.to_string().chars().all(|character| !character.is_control()));
            prop_assert!(refusal.host.chars().count() <= SHOWN_CHARACTERS_MAX * 10);
        }
    }

    #[test]
    fn a_displayed_host_parses_to_the_same_host(text in "[a-zA-Z0-9.-]{1,20}|\\[[0-9a-f:.]{2,20}\\]") {
        if let Ok(host) = Host::parse(&text) {
            prop_assert_eq!(Host::parse(&host.to_string()), Ok(host));
        }
    }

    #[test]
    fn a_star_matches_on_label_boundaries_only(
        name in "[a-c-]{0,2}(\\.?[a-c]{1,2}){1,4}",
        parent in "[a-c]{1,2}(\\.[a-c]{1,2}){0,2}",
    ) {
        let list = allowed(&[&format!("*.{parent}")]);
        // The same rule in other words: the parent's labels are the last ones, and there are more.
        let (labels, last): (Vec<_>, Vec<_>) = (name.split('.').collect(), parent.split('.').collect());
        let expected = labels.len() > last.len() && labels.ends_with(&last) && Host::parse(&name).is_ok();
        prop_assert_eq!(list.decide(&name, 443).is_ok(), expected);
    }
}
