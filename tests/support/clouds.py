#!/usr/bin/env python3
"""Clouds for the tests, in one process: moto's EC2 behind a proxy that fails on request, and small
servers that answer as the references of the other providers' APIs say, and check every signature
by computing it anew.

usage: clouds.py MOTO ADDRESS

MOTO is the directory with moto's packages, or "-" for none. Listens on ADDRESS:80 for the metadata
services, whose answers go by who asks, and on ADDRESS:8000 for the APIs. POST /test/... on the
latter changes what happens: faults, routes, instances. Says "ready" when it serves.
"""

import base64
import datetime
import hashlib
import hmac
import http.client
import json
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MOTO, ADDRESS = sys.argv[1:3]
API = 8000
MOTO_PORT = 8001
LOCK = threading.RLock()
# What of the test's making goes wrong: name -> how often still; see `faulty`.
FAULTS = {}
# Requests by (provider, operation).
COUNTS = {}
# Instances by the address that asks.
HOSTS = {}
# Routes of AWS that are shown as black holes, and the most that a table takes.
BLACKHOLES = set()
QUOTA = [1000]
KEYS = {"AKIDtest": "s3cret-of-the-test"}
# Permissions that are taken away.
DENIED = set()


def instance(address):
    """The instance behind an address of the network: the last octet tells them apart."""
    return HOSTS.setdefault(address, {
        "id": f"i-{address.rsplit('.', 1)[1]}", "addresses": [address], "role": "node",
    })


class Table:
    """A route table of a provider without moto: destination -> (next hop, id, enabled, type)."""

    def __init__(self):
        self.routes, self.serial = {}, 0

    def create(self, destination, hop, kind="user", enabled=True):
        self.serial += 1
        self.routes[destination] = {
            "hop": hop, "id": self.serial, "kind": kind, "enabled": enabled,
        }


TABLES = {"tencent": Table(), "ali": Table(), "gce": Table()}
OPERATIONS = {}
PAGE = "<html><body>Please log in</body></html>"
# What each provider answers a change with.
DONE = {
    "aws": lambda action: f"<{action}Response><requestId>1</requestId><return>true</return></{action}Response>",
    "ali": lambda _: '{"RequestId": "r"}',
    "tencent": lambda _: '{"Response": {"RequestId": "r"}}',
    "gce": lambda _: '{"name": "op-1", "status": "DONE"}',
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def date_time_string(self, timestamp=None):
        return super().date_time_string((timestamp or time.time()) + FAULTS.get("date", 0))

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, text, kind="text/plain"):
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer_json(self, status, value):
        self.answer(status, json.dumps(value), "application/json")


class Metadata(Handler):
    """169.254.169.254 of EC2 and Google, 100.100.100.200 of Alibaba, the same of Tencent."""

    def do_PUT(self):
        if FAULTS.get("token-hang"):
            # Beyond the hops that a token's answer has.
            return time.sleep(3600)
        with LOCK:
            if self.path == "/latest/api/token" and FAULTS.get("imds-v1", 0) == 0:
                return self.answer(200, "t0ken-" + self.client_address[0])
        self.answer(404, "")

    def do_GET(self):
        who = self.client_address[0]
        if FAULTS.get("meta-html"):
            return self.answer(200, PAGE, "text/html")
        with LOCK:
            host = instance(who)
            if self.path.startswith("/computeMetadata/v1/"):
                return self.google(host)
            if self.path.startswith("/latest/meta-data/"):
                tokens = [self.headers.get(name) for name in (
                    "X-aws-ec2-metadata-token", "X-aliyun-ecs-metadata-token")]
                is_tencent = FAULTS.get("tencent")
                if not is_tencent and not FAULTS.get("imds-v1") and f"t0ken-{who}" not in tokens:
                    return self.answer(401, "")
                return self.plain(host, self.path[len("/latest/meta-data/"):])
        self.answer(404, "")

    def google(self, host):
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.answer(403, "")
        path = self.path[len("/computeMetadata/v1/"):]
        if path == "project/project-id":
            return self.answer(200, "test-project")
        if path == "instance/?recursive=true":
            interfaces = [{"ip": it, "network": "projects/1/networks/default", "mac": "0e"}
                          for it in host["addresses"]]
            return self.answer_json(200, {
                "name": host["id"], "zone": "projects/1/zones/europe-west1-b",
                "networkInterfaces": interfaces,
            })
        if path == "instance/service-accounts/default/token" and host["role"]:
            return self.answer_json(200, {
                "access_token": "google-t0ken", "expires_in": 3599, "token_type": "Bearer"})
        self.answer(404, "")

    def plain(self, host, path):
        mac = "0e:00:00:00:00:01"
        directory = f"network/interfaces/macs/{mac}"
        found = {
            "": "network/\nplacement/",
            "placement/region": "us-east-1", "region-id": "cn-test", "services/domain": "amazonaws.com",
            "instance-id": host["id"], "vpc-id": "vpc-1", "vswitch-id": "vsw-1", "mac": mac,
            "network/interfaces/macs/": mac + "/",
            f"{directory}/local-ipv4s": "\n".join(host["addresses"]),
            f"{directory}/interface-id": host.get("eni", "eni-1"),
            f"{directory}/subnet-id": host.get("subnet", "subnet-1"),
            f"{directory}/vpc-id": host.get("vpc", "vpc-1"),
            f"iam/security-credentials/{host['role']}": json.dumps({
                "Code": "Success", "AccessKeyId": host.get("key", ""),
                "SecretAccessKey": host.get("secret", ""), "Token": host.get("token", ""),
            }),
            # After the line above: without a role, both are one path.
            "iam/security-credentials/": host["role"],
        }.get(path)
        if found:
            self.answer(200, found)
        else:
            self.answer(404, "")


def faulty(handler, provider, operation):
    """Does what a fault says, if there is one; whether it did."""
    with LOCK:
        COUNTS[f"{provider} {operation}"] = COUNTS.get(f"{provider} {operation}", 0) + 1
        if FAULTS.get("redirect"):
            handler.send_response(302)
            handler.send_header("Location", "http://login.example.org/")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return True
        if operation.startswith("Create") or operation == "routes.insert":
            # Nothing is made, whatever is answered.
            pretended = {"html": PAGE, "empty": "{}", "pretend": DONE[provider](operation)}
            found = [text for name, text in pretended.items() if FAULTS.get(name)]
            if found:
                handler.answer(200, found[0], "text/html")
                return True
        name = next((it for it in ("throttle", "busy", "reset", "hang", "half", "skew") if FAULTS.get(it, 0) > 0), None)
        if not name:
            return False
        FAULTS[name] -= 1
    if name == "throttle" and provider == "aws":
        handler.answer(503, aws_error("RequestLimitExceeded", "Request limit exceeded."), "text/xml")
    elif name == "throttle":
        handler.answer(429, "Too Many Requests")
    elif name == "busy":
        handler.answer(503, "Service Unavailable")
    elif name == "skew":
        handler.answer(400, aws_error("RequestExpired", "Request has expired."), "text/xml")
    elif name == "reset":
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True
        handler.connection.close()
    elif name == "half":
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n<DescribeRouteTables")
        handler.close_connection = True
    elif name == "hang":
        time.sleep(3600)
    return True


def aws_error(code, message):
    return (f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error>"
            "</Errors><RequestID>1</RequestID></Response>")


def sign(key, *parts):
    for part in parts:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


class Api(Handler):
    def do_GET(self):
        if self.path.startswith("/test/"):
            return test(self, self.path[6:], None)
        return self.google(self.body())

    def do_DELETE(self):
        return self.google(self.body())

    def do_POST(self):
        body = self.body()
        if self.path.startswith("/test/"):
            return test(self, self.path[6:], json.loads(body or b"null"))
        if self.path.startswith("/compute/"):
            return self.google(body)
        if self.path == "/token":
            return self.google_token(body)
        if self.headers.get("X-TC-Action"):
            return self.tencent(body)
        fields = dict(urllib.parse.parse_qsl(body.decode()))
        if "SignatureNonce" in fields:
            return self.ali(fields)
        return self.aws(fields, body)

    # AWS: moto's, behind this proxy.
    def aws(self, fields, body):
        action = fields.get("Action", "")
        if faulty(self, "aws", action):
            return None
        if action == "CreateRoute":
            table = aws_table(fields["RouteTableId"])
            with LOCK:
                if len(table) >= QUOTA[0]:
                    return self.answer(400, aws_error(
                        "RouteLimitExceeded", "The maximum number of routes has been reached."))
        if action in ("DeleteRoute", "ReplaceRoute"):
            with LOCK:
                BLACKHOLES.discard(fields["DestinationCidrBlock"])
        connection = http.client.HTTPConnection("127.0.0.1", MOTO_PORT)
        connection.request("POST", self.path, body, dict(self.headers))
        answer = connection.getresponse()
        text = answer.read().decode()
        if action == "DescribeRouteTables":
            text = blacken(text)
            if FAULTS.get("endless"):
                text = text.replace("</DescribeRouteTablesResponse>",
                                    "<nextToken>again</nextToken></DescribeRouteTablesResponse>")
        self.answer(answer.status, text, "text/xml")

    # Tencent: https://www.tencentcloud.com/document/api/213/33224 and 215/15767.
    def tencent(self, body):
        action = self.headers["X-TC-Action"]
        if faulty(self, "tencent", action):
            return None

        def fail(code, message=""):
            self.answer_json(200, {"Response": {
                "Error": {"Code": code, "Message": message}, "RequestId": "r"}})

        stamp = self.headers["X-TC-Timestamp"]
        day = datetime.datetime.fromtimestamp(int(stamp), datetime.timezone.utc).strftime("%Y-%m-%d")
        canonical = "\n".join([
            "POST", "/", "", "content-type:" + self.headers["Content-Type"],
            "host:" + self.headers["Host"], "x-tc-action:" + action.lower(), "",
            "content-type;host;x-tc-action", hashlib.sha256(body).hexdigest()])
        text = "\n".join(["TC3-HMAC-SHA256", stamp, f"{day}/vpc/tc3_request",
                          hashlib.sha256(canonical.encode()).hexdigest()])
        proof = re.fullmatch(
            r"TC3-HMAC-SHA256 Credential=(\w+)/([\w-]+)/vpc/tc3_request, "
            r"SignedHeaders=content-type;host;x-tc-action, Signature=(\w+)",
            self.headers["Authorization"])
        if not proof or proof[1] not in KEYS:
            return fail("AuthFailure.SecretIdNotFound")
        if abs(time.time() - int(stamp)) > 300 or FAULTS.get("late"):
            return fail("AuthFailure.SignatureExpire", "The request has expired.")
        if sign(("TC3" + KEYS[proof[1]]).encode(), day, "vpc", "tc3_request", text) != proof[3]:
            return fail("AuthFailure.SignatureFailure")
        if f"vpc:{action}" in DENIED:
            return fail("UnauthorizedOperation", "no permission")
        asked = json.loads(body)
        with LOCK:
            table = TABLES["tencent"]
            if action == "DescribeRouteTables":
                assert asked["Filters"] == [{"Name": "vpc-id", "Values": ["vpc-1"]}], asked
                routes = [{
                    "RouteId": it["id"], "DestinationCidrBlock": to, "GatewayId": it["hop"],
                    "GatewayType": "NORMAL_CVM", "RouteType": it["kind"].upper(),
                    "Enabled": it["enabled"]} for to, it in table.routes.items()]
                return self.answer_json(200, {"Response": {
                    "RequestId": "r", "TotalCount": 1000000 if FAULTS.get("endless") else 1,
                    "RouteTableSet": [{
                        "RouteTableId": "rtb-1", "Main": True, "VpcId": "vpc-1", "RouteSet": routes,
                        "AssociationSet": []}]}})
            if action == "CreateRoutes":
                (route,) = asked["Routes"]
                if len(table.routes) >= QUOTA[0]:
                    return fail("LimitExceeded.RouteQuota", "full")
                if route["DestinationCidrBlock"] in table.routes:
                    return fail("InvalidParameterValue.Duplicate", "there is one")
                assert route["GatewayType"] == "NORMAL_CVM" and route["Enabled"]
                table.create(route["DestinationCidrBlock"], route["GatewayId"])
                return self.answer_json(200, {"Response": {"RequestId": "r"}})
            if action == "DeleteRoutes":
                (route,) = asked["Routes"]
                gone = [to for to, it in table.routes.items() if it["id"] == route["RouteId"]]
                for to in gone:
                    del table.routes[to]
                return self.answer_json(200, {"Response": {"RequestId": "r"}})
        fail("InvalidAction", action)

    # Alibaba: https://www.alibabacloud.com/help/en/vpc, version 2016-04-28.
    def ali(self, fields):
        action = fields["Action"]
        if faulty(self, "ali", action):
            return None

        def fail(status, code):
            self.answer_json(status, {"Code": code, "Message": code, "RequestId": "r"})

        signature = fields.pop("Signature")

        def quote(text):
            return urllib.parse.quote(text, safe="-_.~")

        query = "&".join(f"{quote(key)}={quote(fields[key])}" for key in sorted(fields))
        secret = KEYS.get(fields["AccessKeyId"])
        if not secret:
            return fail(404, "InvalidAccessKeyId.NotFound")
        expected = hmac.new((secret + "&").encode(), f"POST&%2F&{quote(query)}".encode(), hashlib.sha1)
        if base64.b64encode(expected.digest()).decode() != signature:
            return fail(400, "SignatureDoesNotMatch")
        if FAULTS.get("late"):
            return fail(400, "InvalidTimeStamp.Expired")
        if f"vpc:{action}" in DENIED:
            return fail(403, "Forbidden.RAM")
        with LOCK:
            table = TABLES["ali"]
            to = fields.get("DestinationCidrBlock")
            if action == "DescribeRouteTableList":
                return self.answer_json(200, {"RequestId": "r", "RouterTableList": {"RouterTableListType": [{
                    "RouteTableId": "vtb-1", "RouteTableType": "System",
                    "VSwitchIds": {"VSwitchId": ["vsw-1"]}}]}})
            if action == "DescribeRouteEntryList":
                # Pages of two, so that lists have several.
                begin = int(fields.get("NextToken", "0"))
                some = list(table.routes.items())[begin:begin + 2]
                has_more = begin + 2 < len(table.routes) or FAULTS.get("endless")
                next_token = str(begin + 2) if has_more else ""
                return self.answer_json(200, {"RequestId": "r", "NextToken": next_token, "RouteEntrys": {"RouteEntry": [
                    {"DestinationCidrBlock": key, "Type": "Custom", "Status": "Available",
                     "RouteEntryId": f"rte-{it['id']}",
                     "NextHops": {"NextHop": [{"NextHopId": it["hop"], "NextHopType": "Instance"}]}}
                    for key, it in some]}})
            if action == "CreateRouteEntry":
                if len(table.routes) >= QUOTA[0]:
                    return fail(400, "QuotaExceeded.RouteEntry")
                if to in table.routes:
                    return fail(400, "InvalidCidrBlock.Duplicate")
                assert fields["NextHopType"] == "Instance"
                table.create(to, fields["NextHopId"])
                return self.answer_json(200, {"RequestId": "r", "RouteEntryId": "rte-1"})
            if action == "DeleteRouteEntry":
                if table.routes.get(to, {}).get("hop") != fields["NextHopId"]:
                    return fail(404, "InvalidRouteEntry.NotFound")
                del table.routes[to]
                return self.answer_json(200, {"RequestId": "r"})
        fail(400, "InvalidAction")

    # Google: https://cloud.google.com/compute/docs/reference/rest/v1/routes.
    def google(self, body):
        path = self.path[len("/compute/v1/projects/test-project/global/"):]
        operation = {"GET": "get", "DELETE": "routes.delete", "POST": "routes.insert"}[self.command]
        if faulty(self, "gce", operation):
            return None

        def fail(status, reason, message=""):
            self.answer_json(status, {"error": {
                "code": status, "message": message, "errors": [{"reason": reason}]}})

        if self.headers.get("Authorization") not in ("Bearer google-t0ken", "Bearer file-t0ken"):
            return fail(401, "authError", "Invalid Credentials")
        if operation in DENIED:
            return fail(403, "forbidden", "Required 'compute.routes.create' permission")
        with LOCK:
            table = TABLES["gce"]
            base = "https://www.googleapis.com/compute/v1/projects/test-project"
            if path.startswith("operations/"):
                name = path.split("/")[1]
                OPERATIONS[name] = OPERATIONS.get(name, 0) + 1
                is_done = OPERATIONS[name] > 1 and not FAULTS.get("running")
                status = "DONE" if is_done else "RUNNING"
                return self.answer_json(200, {"name": name, "status": status})
            if self.command == "POST":
                route = json.loads(body)
                assert route["priority"] == 1000 and route["tags"] == [], route
                if route["name"] in table.routes:
                    return fail(409, "alreadyExists")
                if len(table.routes) >= QUOTA[0]:
                    return fail(403, "quotaExceeded", "Quota 'ROUTES' exceeded.")
                table.routes[route["name"]] = route
                return self.answer_json(200, {"name": f"op-{time.time()}", "status": "PENDING"})
            name = path.split("/")[1]
            if name not in table.routes:
                return fail(404, "notFound")
            if self.command == "DELETE":
                del table.routes[name]
                return self.answer_json(200, {"name": f"op-{time.time()}", "status": "PENDING"})
            route = table.routes[name]
            return self.answer_json(200, {
                "name": name, "destRange": route["destRange"],
                "network": f"{base}/{route['network'].split('/', 2)[2]}",
                "nextHopInstance": f"{base}/{route['nextHopInstance'].split('/', 2)[2]}"})

    def google_token(self, body):
        fields = dict(urllib.parse.parse_qsl(body.decode()))
        header, claims, _ = fields["assertion"].split(".")
        decoded = [json.loads(base64.urlsafe_b64decode(it + "==")) for it in (header, claims)]
        assert decoded[0] == {"alg": "RS256", "typ": "JWT"}, decoded
        assert decoded[1]["iss"] == "weft@test-project.iam.gserviceaccount.com", decoded
        verify_rs256(fields["assertion"])
        self.answer_json(200, {"access_token": "file-t0ken", "token_type": "Bearer"})


PUBLIC_KEY = [None]


def verify_rs256(token):
    """RFC 8017, by hand: the signature to the public exponent is the padded digest."""
    modulus, exponent = PUBLIC_KEY[0]
    signed, signature = token.rsplit(".", 1)
    size = (modulus.bit_length() + 7) // 8
    number = int.from_bytes(base64.urlsafe_b64decode(signature + "=="), "big")
    found = pow(number, exponent, modulus).to_bytes(size, "big")
    digest = bytes.fromhex("3031300d060960864801650304020105000420")
    digest += hashlib.sha256(signed.encode()).digest()
    assert found == b"\x00\x01" + b"\xff" * (size - len(digest) - 3) + b"\x00" + digest


def blacken(text):
    """moto knows no black holes: a route stays active when its interface is gone."""
    for destination in list(BLACKHOLES):
        pattern = f"(<destinationCidrBlock>{re.escape(destination)}</destinationCidrBlock>.*?)<state>active"
        text = re.sub(pattern, r"\1<state>blackhole", text, flags=re.DOTALL)
    return text


def ec2():
    import boto3
    return boto3.client("ec2", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{MOTO_PORT}",
                        aws_access_key_id="admin", aws_secret_access_key="admin")


def unchecked(work):
    """moto checks who asks; not the test itself."""
    from moto import settings
    before = settings.INITIAL_NO_AUTH_ACTION_COUNT
    settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
    try:
        return work()
    finally:
        settings.INITIAL_NO_AUTH_ACTION_COUNT = before


def aws_table(table):
    from moto.ec2.models import ec2_backends
    from moto.core import DEFAULT_ACCOUNT_ID
    routes = ec2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].route_tables[table].routes
    return [it.destination_cidr_block for it in routes]


def test(handler, what, given):
    """What a test may ask and change."""
    with LOCK:
        answer = {
            "fault": lambda: FAULTS.update(given),
            "denied": lambda: (DENIED.clear(), DENIED.update(given)),
            "quota": lambda: QUOTA.__setitem__(0, given),
            "blackhole": lambda: BLACKHOLES.add(given),
            "counts": lambda: dict(COUNTS),
            "host": lambda: HOSTS.setdefault(given["address"], instance(given["address"])).update(given["is"]),
            "moved": lambda: HOSTS.__setitem__(given[1], HOSTS[given[0]] | {"addresses": [given[1]]}),
            "public_key": lambda: PUBLIC_KEY.__setitem__(0, (int(given["modulus"], 16), given["exponent"])),
            "routes": lambda: {name: table.routes for name, table in TABLES.items()},
            "create": lambda: TABLES[given["provider"]].create(given["to"], given["hop"], given.get("kind", "user")),
            "gce_route": lambda: TABLES["gce"].routes.__setitem__(given["name"], given),
            "delete": lambda: TABLES[given["provider"]].routes.pop(given["to"]),
        }
        if what in answer:
            return handler.answer_json(200, answer[what]())
    answer = {
        "aws/vpc": aws_vpc, "aws/routes": aws_routes, "aws/create": aws_create,
        "aws/delete": aws_delete, "aws/policy": aws_policy, "aws/interface": aws_interface,
    }
    handler.answer_json(200, unchecked(lambda: answer[what](given)))


def aws_vpc(hosts):
    """A VPC with an interface for each host, whose route tables are the main one and another."""
    import boto3
    client = ec2()
    vpc = client.create_vpc(CidrBlock="172.31.0.0/16")["Vpc"]["VpcId"]
    subnet = client.create_subnet(VpcId=vpc, CidrBlock="172.31.0.0/24")["Subnet"]["SubnetId"]
    iam = boto3.client("iam", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{MOTO_PORT}",
                       aws_access_key_id="admin", aws_secret_access_key="admin")
    iam.create_user(UserName="node")
    key = iam.create_access_key(UserName="node")["AccessKey"]
    enis = {}
    for address in hosts:
        eni = client.create_network_interface(SubnetId=subnet, PrivateIpAddress=address)
        enis[address] = eni["NetworkInterface"]["NetworkInterfaceId"]
        instance(address).update({
            "eni": enis[address], "subnet": subnet, "vpc": vpc, "key": key["AccessKeyId"],
            "secret": key["SecretAccessKey"]})
    main = client.describe_route_tables(Filters=[
        {"Name": "vpc-id", "Values": [vpc]}, {"Name": "association.main", "Values": ["true"]}])
    other = client.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    aws_policy(["ec2:*"])
    from moto import settings
    return {"enis": enis, "main": main["RouteTables"][0]["RouteTableId"], "other": other,
            "key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}


def aws_policy(actions):
    import boto3
    iam = boto3.client("iam", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{MOTO_PORT}",
                       aws_access_key_id="admin", aws_secret_access_key="admin")
    iam.put_user_policy(UserName="node", PolicyName="p", PolicyDocument=json.dumps({
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}))


def aws_routes(table):
    found = ec2().describe_route_tables(RouteTableIds=[table])["RouteTables"][0]["Routes"]
    return {it["DestinationCidrBlock"]: it.get("NetworkInterfaceId", "") for it in found}


def aws_create(given):
    ec2().create_route(RouteTableId=given["table"], DestinationCidrBlock=given["to"],
                       NetworkInterfaceId=given["eni"])


def aws_delete(given):
    ec2().delete_route(RouteTableId=given["table"], DestinationCidrBlock=given["to"])


def aws_interface(eni):
    found = ec2().describe_network_interfaces(NetworkInterfaceIds=[eni])["NetworkInterfaces"][0]
    return {"check": found["SourceDestCheck"]}


def main():
    if MOTO != "-":
        sys.path.insert(0, MOTO)
        from moto import settings
        from moto.server import ThreadedMotoServer
        import logging
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        ThreadedMotoServer(ip_address="127.0.0.1", port=MOTO_PORT, verbose=False).start()
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0.0
    for port, handler in ((80, Metadata), (API, Api)):
        server = ThreadingHTTPServer(("0.0.0.0", port), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    threading.Event().wait()


main()
