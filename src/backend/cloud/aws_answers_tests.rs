//! Answers as EC2 and STS write them.

use super::*;

const ANSWER: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<DescribeRouteTablesResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
  <routeTableSet>
    <item>
      <routeTableId>rtb-1</routeTableId>
      <routeSet>
        <item><destinationCidrBlock>172.31.0.0/16</destinationCidrBlock>
          <gatewayId>local</gatewayId><state>active</state></item>
        <item><destinationCidrBlock>10.5.3.0/24</destinationCidrBlock>
          <networkInterfaceId>eni-1</networkInterfaceId><state>active</state></item>
        <item><destinationCidrBlock>10.5.4.0/24</destinationCidrBlock>
          <networkInterfaceId>eni-2</networkInterfaceId><state>active</state></item>
        <item><destinationCidrBlock>10.5.5.0/24</destinationCidrBlock>
          <networkInterfaceId>eni-3</networkInterfaceId><state>blackhole</state></item>
        <item><destinationCidrBlock>10.5.6.0/24</destinationCidrBlock>
          <vpcPeeringConnectionId>pcx-1</vpcPeeringConnectionId><state>blackhole</state></item>
        <item><destinationCidrBlock>10.5.7.0/24</destinationCidrBlock>
          <networkInterfaceId>eni-1</networkInterfaceId><origin>CreateRouteTable</origin>
          <state>active</state></item>
        <item><destinationIpv6CidrBlock>::/0</destinationIpv6CidrBlock>
          <gatewayId>igw-1</gatewayId><state>active</state></item>
      </routeSet>
      <associationSet><item><routeTableId>rtb-9</routeTableId></item></associationSet>
    </item>
    <item><routeTableId>rtb-2</routeTableId><routeSet/></item>
  </routeTableSet>
</DescribeRouteTablesResponse>"#;

#[test]
fn routes_lead_here_nowhere_elsewhere_or_are_fixed() {
    let found = tables(ANSWER, "eni-1").unwrap();
    let ids: Vec<_> = found.iter().map(|table| table.id.as_str()).collect();
    assert_eq!(ids, ["rtb-1", "rtb-2"]);
    let leads: Vec<_> =
        found[0].entries.iter().map(|it| (it.destination.to_string(), it.leads)).collect();
    let expected = [
        ("172.31.0.0/16", Leads::Fixed),
        ("10.5.3.0/24", Leads::Here),
        ("10.5.4.0/24", Leads::Elsewhere),
        ("10.5.5.0/24", Leads::Nowhere),
        // A peering's, which is none of weftd's.
        ("10.5.6.0/24", Leads::Fixed),
        // The VPC's own, which somebody has led to the interface.
        ("10.5.7.0/24", Leads::Fixed),
    ];
    assert_eq!(leads, expected.map(|(text, leads)| (text.to_owned(), leads)));
    assert!(tables("<html>", "eni-1").is_err(), "half an answer is an empty table");
}

#[test]
fn only_the_operations_own_answer_is_one() {
    let of = |text: &str| is_answer(text, "CreateRoute");
    let answer = |outcome: &str| {
        format!(
            r#"<CreateRouteResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
            <requestId>x</requestId><return>{outcome}</return></CreateRouteResponse>"#
        )
    };
    assert!(of(&answer("true")));
    for other in ["", "{}", "<html><body>Log in</body></html>", &answer("false")] {
        assert!(!of(other), "taken for done: {other}");
    }
    assert!(!is_answer(&answer("true"), "ReplaceRoute"), "another operation's");
    assert!(is_answer(ANSWER, "DescribeRouteTables"));
    assert_eq!(next_token(ANSWER), "");
    let more = "<DescribeRouteTablesResponse><routeTableSet/><nextToken>t</nextToken>\
                </DescribeRouteTablesResponse>";
    assert_eq!(next_token(more), "t", "the rest of the tables is not looked at");
}

#[test]
fn errors_of_both_services_are_read() {
    let ec2 = "<Response><Errors><Error><Code>RouteLimitExceeded</Code>\
               <Message>The maximum number of routes has been reached.</Message></Error></Errors>\
               <RequestID>1</RequestID></Response>";
    assert_eq!(refusal(ec2).unwrap().0, "RouteLimitExceeded");
    let sts = r#"<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error>
                 <Type>Sender</Type><Code>InvalidIdentityToken</Code><Message>m</Message></Error>
                 </ErrorResponse>"#;
    assert_eq!(refusal(sts).unwrap(), ("InvalidIdentityToken".to_owned(), "m".to_owned()));
    assert_eq!(refusal("Service Unavailable"), None);
}
